"""Which segments share a pack: lengths in, compact bins out.

Lengths are small integers, so packers work on their histogram, never item by item (`tree.py`); a counting sort and one
sequential pass turn the result into `order` and `offsets`: 10M lengths in 0.1 s on one core. `auto` adds the pattern
searches of `patterns.py` where first-fit and best-fit decreasing stand above the lower bound of Martello and Toth
(1990). Add a variant as an entry of `PACKERS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.packing.choice import NO_LIMIT, MakeTree, best_fit_tree, best_tree, first_fit_tree, histogram_bound
from pipeline.packing.kernels import kernel
from pipeline.packing.tree import write_bins
from shards.cost import PAD_MULTIPLE
from shards.errors import PackError, SegmentTooLongError


class Bins(NamedTuple):
    """Segments by bin: bin `b` holds the segments `order[offsets[b] : offsets[b + 1]]`."""

    order: np.ndarray
    "Segment indices, every one once; int64, shape (num_segments,)."
    offsets: np.ndarray
    "Where each bin starts in `order`, then the end; int64, shape (num_bins + 1,)."

    @property
    def num_bins(self) -> int:
        """How many bins there are."""
        return len(self.offsets) - 1


class Drawing:
    """Bins of the same segments, drawn by one seed after another: each bin keeps its lengths, equal ones change places.

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a bin, in tokens.
        make_tree: Of a packer that has one.
        max_segments: Maximum number of segments in one bin; None for no limit.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len].
        PackError: Lengths are not a flat array of integers, or `max_segments` is below 1.
    """

    def __init__(self, lengths: np.ndarray, seq_len: int, make_tree: MakeTree, max_segments: int | None = None) -> None:
        self._lengths, self._histogram = _checked(lengths, seq_len, max_segments)
        self._tree = make_tree(self._histogram, max_segments)
        self.num_bins: int = self._tree.num_bins
        "How many bins there are, whatever the seed."

    @property
    def num_movable(self) -> int:
        """Segments that have another of their length: only these change places."""
        return int(self._histogram[self._histogram > 1].sum())

    def bins(self, seed: int | None) -> Bins:
        """Return the bins that a seed draws; None keeps segments of equal length in input order."""
        grouped = _grouped(self._lengths, self._histogram, seed)
        # Allocated here, not in a kernel: numpy asks for huge pages.
        bins = Bins(np.empty(len(self._lengths), np.int64), np.zeros(self.num_bins + 1, np.int64))
        write_bins(*self._tree, np.cumsum(self._histogram) - self._histogram, grouped, *bins)
        return bins


def auto(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Pack by the best of first-fit decreasing, best-fit decreasing and a pattern search.

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a bin, in tokens.
        seed: Shuffles segments of equal length; None keeps them in input order.
        max_segments: Maximum number of segments in one bin; None for no limit.

    Returns:
        The bins; how many is a function of the histogram of lengths alone.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len].
        PackError: Lengths are not a flat array of integers, or `max_segments` is below 1.
    """
    return Drawing(lengths, seq_len, best_tree, max_segments).bins(seed)


def first_fit(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Pack by first-fit decreasing, exactly.

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a bin, in tokens.
        seed: Shuffles segments of equal length; None keeps them in input order.
        max_segments: Maximum number of segments in one bin; None for no limit.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len].
        PackError: Lengths are not a flat array of integers, or `max_segments` is below 1.
    """
    return Drawing(lengths, seq_len, first_fit_tree, max_segments).bins(seed)


def best_fit(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Pack by best-fit decreasing, exactly.

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a bin, in tokens.
        seed: Shuffles segments of equal length; None keeps them in input order.
        max_segments: Maximum number of segments in one bin; None for no limit.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len].
        PackError: Lengths are not a flat array of integers, or `max_segments` is below 1.
    """
    return Drawing(lengths, seq_len, best_fit_tree, max_segments).bins(seed)


def next_fit(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Fill one bin at a time, in corpus order.

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a bin, in tokens.
        seed: Plays no part.
        max_segments: Maximum number of segments in one bin; None for no limit.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len].
        PackError: Lengths are not a flat array of integers, or `max_segments` is below 1.
    """
    lengths, _ = _checked(lengths, seq_len, max_segments)
    offsets = np.empty(len(lengths) + 1, np.int64)
    num_bins = _fill_in_order(lengths, seq_len, max_segments or NO_LIMIT, offsets)
    return Bins(np.arange(len(lengths)), offsets[: num_bins + 1].copy())


def bucketed(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Put one segment in each bin, by rising padded length (for padded models).

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a bin, in tokens.
        seed: Shuffles segments of one padded length; None keeps them in input order.
        max_segments: Plays no part.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len].
        PackError: Lengths are not a flat array of integers, or `max_segments` is below 1.
    """
    lengths, _ = _checked(lengths, seq_len, max_segments)
    keys = (lengths + (PAD_MULTIPLE - 1)) // PAD_MULTIPLE
    order = _grouped(keys, np.bincount(keys, minlength=1), seed).astype(np.int64)
    return Bins(order, np.arange(len(lengths) + 1))


def unpacked(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Put one segment in each bin, in corpus order.

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a bin, in tokens.
        seed: Plays no part.
        max_segments: Plays no part.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len].
        PackError: Lengths are not a flat array of integers, or `max_segments` is below 1.
    """
    lengths, _ = _checked(lengths, seq_len, max_segments)
    return Bins(np.arange(len(lengths)), np.arange(len(lengths) + 1))


@dataclass(frozen=True, kw_only=True)
class Packer:
    """A way to pack; call it as the function that it holds: `packer(lengths, seq_len, seed=0, max_segments=None)`."""

    function: Callable[..., Bins]
    make_tree: MakeTree | None = None
    "How it decides which lengths share a bin; None where the order of segments plays a part."
    cut_policy: str | None = None
    """The policy by which documents are cut for it (a key of `cutting.POLICIES`), whatever the user's choice for those
    that are too long: every segment is kept then, with or without targets. None leaves cutting to the user."""

    def __call__(
        self, lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None
    ) -> Bins:
        """Pack segments; arguments, result and errors as in `auto`."""
        return self.function(lengths, seq_len, seed=seed, max_segments=max_segments)


def pack(lengths: npt.ArrayLike, seq_len: int, packer: str = "auto", seed: int = 0) -> Bins:
    """Decide which segments share a pack.

    For lengths 7, 3, 6, 4 and `seq_len` 10 the packs are (4, 6) and (3, 7): `order` [3, 2, 1, 0], `offsets` [0, 2, 4].

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a pack, in tokens.
        packer: A key of `PACKERS`.
        seed: Shuffles segments of equal length.

    Returns:
        `order`: int64 (num_segments,), every index once; `offsets`: int64 (num_bins + 1,), where each bin starts in
        `order`, then the end.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len]. Cut documents with `pipeline.packing.cutting.cut` first.
        PackError: No such packer, or lengths are not a flat array of integers.
    """
    if packer not in PACKERS:
        raise PackError(f"packer: {packer!r}; expected one of {', '.join(PACKERS)}.")
    return PACKERS[packer](np.asarray(lengths), seq_len, seed=seed)


def lower_bound(lengths: np.ndarray, seq_len: int, max_segments: int | None = None) -> int:
    """Fewest bins that any packing could need; see `histogram_bound`."""
    return histogram_bound(length_histogram(lengths, seq_len), max_segments)


def length_histogram(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Count segments by length.

    Args:
        lengths: Tokens per segment; integers, shape (num_segments,), each in [1, seq_len].
        seq_len: Capacity of a bin, in tokens.

    Returns:
        int64, shape (seq_len + 1,).

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len]; the message names it.
        PackError: `lengths` is not a flat array of integers.
    """
    return _checked(lengths, seq_len, None)[1]


def _checked(lengths: np.ndarray, seq_len: int, max_segments: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Lengths as contiguous int32, and their histogram."""
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or not (np.issubdtype(lengths.dtype, np.integer) or lengths.size == 0):
        raise PackError(f"lengths: {lengths.dtype} of shape {lengths.shape}; expected a flat array of integers.")
    if lengths.size >= 2**31:
        raise PackError(f"lengths: {lengths.size} segments; expected fewer than {2**31}. Pack them in parts.")
    if max_segments is not None and max_segments < 1:
        raise PackError(f"max_segments: {max_segments}; expected at least 1.")
    if lengths.size and not (lengths.min() >= 1 and lengths.max() <= seq_len):
        bad = int(np.flatnonzero((lengths < 1) | (lengths > seq_len))[0])
        raise SegmentTooLongError(
            f"lengths[{bad}]: {lengths[bad]} tokens; expected 1 to {seq_len}. Cut segments to seq_len before packing."
        )
    # One form for kernels: each other type, order or write protection would be compiled anew.
    lengths = np.require(lengths, np.int32, ["C", "W"])
    return lengths, np.bincount(lengths, minlength=seq_len + 1)


PACKERS = {
    "auto": Packer(function=auto, make_tree=best_tree),
    "ffd": Packer(function=first_fit, make_tree=first_fit_tree),
    "bfd": Packer(function=best_fit, make_tree=best_fit_tree),
    "next-fit": Packer(function=next_fit),
    "wrapped": Packer(function=next_fit, cut_policy="wrapped"),
    "bucketed": Packer(function=bucketed),
    "unpacked": Packer(function=unpacked),
}


def _grouped(keys: np.ndarray, histogram: np.ndarray, seed: int | None) -> np.ndarray:
    """Segment indices by rising key, equal keys shuffled by seed or, without one, in input order."""
    grouped = np.empty(len(keys), np.int32)
    free = (np.cumsum(histogram) - histogram).astype(np.int32)
    _group(keys, free, grouped)  # leaves in `free` where each key ends
    if seed is not None:
        _shuffle_ties(grouped, free, np.uint64(seed % 2**64))
    return grouped


@kernel(lambda lengths, *_: 3 * len(lengths))
def _group(lengths: np.ndarray, free: np.ndarray, order: np.ndarray) -> None:
    """Counting sort: fill `order` with segment indices by rising length; `free` holds where each length starts."""
    for i in range(len(lengths)):
        slot = free[lengths[i]]
        order[slot] = i
        free[lengths[i]] = slot + 1


@kernel(lambda order, *_: 6 * len(order))
def _shuffle_ties(order: np.ndarray, ends: np.ndarray, seed: np.uint64) -> None:
    """Shuffle `order` inside each length (Fisher-Yates: the slots of one length fit the cache, all would not)."""
    state = seed
    start = 0
    for end in ends:
        for k in range(end - start - 1, 0, -1):
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            other = start + np.int64(((state >> np.uint64(32)) * np.uint64(k + 1)) >> np.uint64(32))
            order[start + k], order[other] = order[other], order[start + k]
        start = end


@kernel(lambda lengths, *_: 3 * len(lengths))
def _fill_in_order(lengths: np.ndarray, seq_len: int, max_segments: int, offsets: np.ndarray) -> int:
    offsets[0] = 0
    num_bins = start = used = 0
    for i in range(len(lengths)):
        if used + lengths[i] > seq_len or i - start == max_segments:
            num_bins += 1
            offsets[num_bins] = start = i
            used = 0
        used += lengths[i]
    if len(lengths):
        num_bins += 1
        offsets[num_bins] = len(lengths)
    return num_bins
