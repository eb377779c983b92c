"""Silence for the libraries that load models and data: one error of ours says what was tried, not their log lines."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# module, and its functions that tell whether bars are shown, hide them and show them
BARS = (
    ("huggingface_hub.utils", "are_progress_bars_disabled", "disable_progress_bars", "enable_progress_bars"),
    ("datasets", "are_progress_bars_disabled", "disable_progress_bars", "enable_progress_bars"),
    ("transformers.utils.logging", "is_progress_bar_enabled", "disable_progress_bar", "enable_progress_bar"),
)


@contextmanager
def quiet(*, bars: bool | None = None) -> Iterator[None]:
    """Keep retries of the Hub's client off the terminal, and progress bars of the Hub, datasets and transformers.

    Args:
        bars: Whether progress bars are hidden; None hides them where stderr is not a terminal. Only libraries that are
            imported already are touched.
    """
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    hidden = []
    if bars or (bars is None and not sys.stderr.isatty()):
        for name, asked, hide, show in BARS:
            library: Any = sys.modules.get(name)
            if library is None:
                continue
            shown = bool(getattr(library, asked)()) != asked.startswith("are_progress_bars_disabled")
            if shown:
                getattr(library, hide)()
                hidden.append(getattr(library, show))
    try:
        yield
    finally:
        logger.setLevel(level)
        for restore in hidden:
            restore()
