"""Asking the hub without its client's own lines: our one error says what was tried, not each of five retries."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep warnings of the hub's client, such as those about retries, off the terminal."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
