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

from pipeline.packing.kernels import kernel
from pipeline.packing.patterns import fill_exactly, fill_longest
from pipeline.packing.tree import PackingTree, decreasing, join, write_bins
from shards.cost import PAD_MULTIPLE
from shards.errors import PackError, SegmentTooLongError

NO_LIMIT = 1 << 40


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
    lengths, histogram = _checked(lengths, seq_len, max_segments)
    tree = _best_tree(histogram, max_segments or NO_LIMIT, histogram_bound(histogram, max_segments))
    return _bins_of_tree(lengths, histogram, tree, seed)


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
    lengths, histogram = _checked(lengths, seq_len, max_segments)
    return _bins_of_tree(lengths, histogram, decreasing(histogram, max_segments or NO_LIMIT, best_fit=False), seed)


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
    lengths, histogram = _checked(lengths, seq_len, max_segments)
    return _bins_of_tree(lengths, histogram, decreasing(histogram, max_segments or NO_LIMIT, best_fit=True), seed)


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
    cut_policy: str | None = None
    """The policy by which documents are cut for it (a key of `cutting.POLICIES`), whatever the user's choice for those
    that are too long: every segment is kept then, with or without targets. None leaves cutting to the user."""

    def __call__(
        self, lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None
    ) -> Bins:
        """Pack segments; arguments, result and errors as in `auto`."""
        return self.function(lengths, seq_len, seed=seed, max_segments=max_segments)


PACKERS = {
    "auto": Packer(function=auto),
    "ffd": Packer(function=first_fit),
    "bfd": Packer(function=best_fit),
    "next-fit": Packer(function=next_fit),
    "wrapped": Packer(function=next_fit, cut_policy="wrapped"),
    "bucketed": Packer(function=bucketed),
    "unpacked": Packer(function=unpacked),
}


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


def histogram_bound(histogram: np.ndarray, max_segments: int | None = None) -> int:
    """Fewest bins that any packing of a histogram could need.

    The larger of Martello and Toth's L2 (never below tokens / capacity) and, with a limit, segments / limit. L2, for
    every `small` up to half the capacity: segments above half need a bin each; what lies between `small` and half must
    fit beside those of them that leave room for it, or needs bins of its own; what is shorter is forgotten.

    Args:
        histogram: Segments of each length; int64, shape (seq_len + 1,).
        max_segments: Maximum number of segments in one bin; None for no limit.
    """
    seq_len = len(histogram) - 1
    half = seq_len // 2
    count, tokens = np.cumsum(histogram), np.cumsum(histogram * np.arange(seq_len + 1))
    small = np.arange(half + 1)
    longest = seq_len - small
    room = (count[longest] - count[half]) * seq_len - (tokens[longest] - tokens[half])
    rest = tokens[half] - np.concatenate(([0], tokens[:half]))
    bound = int((count[-1] - count[half] + np.maximum(0, -((room - rest) // seq_len))).max())
    return max(bound, -(-int(count[-1]) // max_segments)) if max_segments else bound


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


def _best_tree(histogram: np.ndarray, max_segments: int, bound: int) -> PackingTree:
    """Return the tree with the fewest bins; the search of full patterns runs where the others miss the bound."""
    best = _greedy_tree(histogram, max_segments, bound)
    if best.num_bins > bound:
        exact, left = fill_exactly(histogram, max_segments)
        rest = _greedy_tree(left, max_segments, bound - exact.num_bins)
        best = min(best, join(exact, rest), key=lambda tree: tree.num_bins)
    return best


def _greedy_tree(histogram: np.ndarray, max_segments: int, bound: int) -> PackingTree:
    trees = [decreasing(histogram, max_segments, best_fit=best_fit) for best_fit in (False, True)]
    if min(tree.num_bins for tree in trees) > bound:
        trees.append(fill_longest(histogram, max_segments))
    return min(trees, key=lambda tree: tree.num_bins)


def _bins_of_tree(lengths: np.ndarray, histogram: np.ndarray, tree: PackingTree, seed: int | None) -> Bins:
    """Give each place of a packing a segment of its length."""
    grouped = _grouped(lengths, histogram, seed)
    # Allocated here, not in a kernel: numpy asks for huge pages.
    bins = Bins(np.empty(len(lengths), np.int64), np.zeros(tree.num_bins + 1, np.int64))
    write_bins(*tree, np.cumsum(histogram) - histogram, grouped, *bins)
    return bins


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
