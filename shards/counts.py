"""Counts of a window, a source or a dataset: a balance sheet, and histograms of lengths.

Documents read = packed + dropped, tokens read = packed + lost, targets read = packed + lost, each with its reasons.
"""

from collections.abc import Mapping
from typing import Any, TypedDict, cast

import numpy as np

# exact up to 256 tokens, then 64 classes an octave: within 1.6 % anywhere
LENGTH_EDGES = np.concatenate(
    [np.arange(1, 256)] + [(1 << octave) + np.arange(64) * (1 << (octave - 6)) for octave in range(8, 31)]
).astype(np.int64)

SET_ASIDE = ("listed", "duplicate", "held_out", "not_held_out")  # reasons that were asked for: no loss

Histogram = list[list[int]]
"`[lower edge of the class in tokens, how many, tokens]` for every class that is not empty, rising."


class DocumentCounts(TypedDict):
    """What became of documents."""

    read: int
    packed: int
    split: int
    truncated: int
    dropped: dict[str, int]


class TokenCounts(TypedDict):
    """What became of tokens, or of targets."""

    read: int
    packed: int
    lost: dict[str, int]


class Counts(TypedDict):
    """The balance sheet of a window, a source or a dataset."""

    documents: DocumentCounts
    tokens: TokenCounts
    targets: TokenCounts
    segments: int
    packs: int


def empty_counts() -> Counts:
    """Return a balance sheet of nothing."""
    return {
        "documents": {"read": 0, "packed": 0, "split": 0, "truncated": 0, "dropped": {}},
        "tokens": {"read": 0, "packed": 0, "lost": {}},
        "targets": {"read": 0, "packed": 0, "lost": {}},
        "segments": 0,
        "packs": 0,
    }


def add_counts(left: Counts, right: Counts) -> Counts:
    """Return the sum of two balance sheets, reason by reason."""
    return cast("Counts", add_numbers(left, right))


def add_numbers(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of two trees of numbers, key by key; a key that one side lacks is 0 there."""
    total = dict(left)
    for key, value in right.items():
        total[key] = add_numbers(total.get(key, {}), value) if isinstance(value, Mapping) else total.get(key, 0) + value
    return total


def imbalance(counts: Counts) -> str | None:
    """Return what does not add up in a balance sheet, or None."""
    sheets: tuple[tuple[str, Any, str], ...] = (
        ("documents", counts["documents"], "dropped"),
        ("tokens", counts["tokens"], "lost"),
        ("targets", counts["targets"], "lost"),
    )
    for thing, sheet, losses in sheets:
        lost = sum(sheet[losses].values())
        if sheet["read"] != sheet["packed"] + lost:
            return f"{thing} read {sheet['read']:,} is not packed {sheet['packed']:,} + {losses} {lost:,}"
    return None


def length_histogram(lengths: np.ndarray) -> Histogram:
    """Count documents or segments by length.

    Args:
        lengths: Tokens of each, int (n,), each >= 1.
    """
    classes = np.searchsorted(LENGTH_EDGES, lengths, side="right") - 1
    counts = np.bincount(classes, minlength=len(LENGTH_EDGES))
    tokens = np.bincount(classes, weights=lengths, minlength=len(LENGTH_EDGES))
    return [[int(LENGTH_EDGES[k]), int(counts[k]), int(tokens[k])] for k in np.flatnonzero(counts)]


class HistogramSum:
    """The sum of histograms, class by class."""

    def __init__(self) -> None:
        self._classes: dict[int, tuple[int, int]] = {}

    def add(self, histogram: Histogram) -> None:
        """Add a histogram."""
        for edge, number, tokens in histogram:
            old = self._classes.get(edge, (0, 0))
            self._classes[edge] = (old[0] + number, old[1] + tokens)

    def total(self) -> Histogram:
        """Return the sum."""
        return [[edge, *both] for edge, both in sorted(self._classes.items())]
