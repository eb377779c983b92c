"""Libraries are silent inside `quiet`, and as before behind it."""

import logging

import datasets
import huggingface_hub.utils as hub
import pytest
import transformers.utils.logging as transformers_logging

from shards.quiet import quiet


def bars() -> list[bool]:
    """Whether the Hub, datasets and transformers show progress bars."""
    return [
        not hub.are_progress_bars_disabled(),
        not datasets.are_progress_bars_disabled(),
        transformers_logging.is_progress_bar_enabled(),
    ]


@pytest.fixture
def shown():
    """All bars on, and as they were afterwards."""
    before = bars()
    switches = (
        (hub.enable_progress_bars, hub.disable_progress_bars),
        (datasets.enable_progress_bars, datasets.disable_progress_bars),
        (transformers_logging.enable_progress_bar, transformers_logging.disable_progress_bar),
    )
    for enable, _ in switches:
        enable()
    yield
    for (enable, disable), was in zip(switches, before, strict=True):
        (enable if was else disable)()


def test_bars_and_retries_are_hidden_and_come_back(shown):
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    with quiet(bars=True):
        assert bars() == [False] * 3
        assert not logger.isEnabledFor(logging.WARNING)
    assert bars() == [True] * 3
    assert logger.level == level


def test_bars_that_were_hidden_stay_hidden(shown):
    datasets.disable_progress_bars()
    with quiet(bars=True):
        pass
    assert bars() == [True, False, True]


def test_a_terminal_keeps_its_bars(shown, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with quiet():
        assert bars() == [True] * 3
