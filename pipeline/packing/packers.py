"""Which segments share a pack: lengths in, compact bins out.

Lengths are small integers, so packers work on their histogram, never item by item. In first-fit and best-fit
decreasing the chosen bin stays the choice until it holds no more items of that length, so bins of equal content move
as one run and the steps depend on the distinct lengths alone. A packing is a tree of such runs (`Plan`); a counting
sort and one sequential pass turn it into `order` and `offsets`: 10M lengths in 0.1 s on one core. `auto` adds the
pattern searches of `patterns.py` where both stand above the lower bound of Martello and Toth (1990).
Add a variant as an entry of `PACKERS`.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from pipeline.packing.patterns import Plan, fill_exactly, fill_longest, join
from shards.cost import PAD_MULTIPLE
from shards.errors import PackError, SegmentTooLongError

NO_LIMIT = 1 << 40
BLOCK = 64  # bins written at a time


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
        seed: Deals segments of equal length at random; None keeps them in input order.
        max_segments: Most segments in one bin; None for no limit.

    Returns:
        The bins; how many is a function of the histogram of lengths alone.

    Raises:
        SegmentTooLongError: A length is outside [1, seq_len].
        PackError: Lengths are not a flat array of integers, or `max_segments` is below 1.
    """
    lengths, histogram = _checked(lengths, seq_len, max_segments)
    most = max_segments or NO_LIMIT
    return _deal_out(lengths, histogram, _best_plan(histogram, most, histogram_bound(histogram, max_segments)), seed)


def first_fit(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Pack by first-fit decreasing, exactly; arguments as `auto`."""
    lengths, histogram = _checked(lengths, seq_len, max_segments)
    return _deal_out(lengths, histogram, Plan(*_decreasing(histogram, max_segments or NO_LIMIT, False)), seed)


def best_fit(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Pack by best-fit decreasing, exactly; arguments as `auto`."""
    lengths, histogram = _checked(lengths, seq_len, max_segments)
    return _deal_out(lengths, histogram, Plan(*_decreasing(histogram, max_segments or NO_LIMIT, True)), seed)


def next_fit(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Fill one bin at a time, in corpus order; `seed` plays no part."""
    lengths, _ = _checked(lengths, seq_len, max_segments)
    offsets = np.empty(len(lengths) + 1, np.int64)
    num_bins = _fill_in_order(lengths, seq_len, max_segments or NO_LIMIT, offsets)
    return Bins(np.arange(len(lengths)), offsets[: num_bins + 1].copy())


def bucketed(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Put one segment in each bin, by rising padded length, dealt by seed inside it (for padded models)."""
    lengths, _ = _checked(lengths, seq_len, max_segments)
    keys = (lengths + (PAD_MULTIPLE - 1)) // PAD_MULTIPLE
    order = _grouped(keys, np.bincount(keys, minlength=1), seed).astype(np.int64)
    return Bins(order, np.arange(len(lengths) + 1))


def unpacked(lengths: np.ndarray, seq_len: int, *, seed: int | None = 0, max_segments: int | None = None) -> Bins:
    """Put one segment in each bin, in corpus order; `seed` plays no part."""
    lengths, _ = _checked(lengths, seq_len, max_segments)
    return Bins(np.arange(len(lengths)), np.arange(len(lengths) + 1))


PACKERS: dict[str, Callable[..., Bins]] = {
    "auto": auto,
    "ffd": first_fit,
    "bfd": best_fit,
    "next-fit": next_fit,
    "bucketed": bucketed,
    "unpacked": unpacked,
}


def kernels_compiled() -> bool:
    """Whether this machine has compiled the packing kernels before (the first call otherwise takes seconds)."""
    return any(Path(str(_emit.stats.cache_path)).glob(f"{Path(__file__).stem}._emit-*.nbi"))


def compile_kernels() -> None:
    """Compile every kernel for this machine and keep the result, so that several workers need not all do it."""
    lengths = np.full(64, 5, np.int32)  # two fit in eleven and one token stays free: the search runs as well
    for packer in PACKERS.values():
        packer(np.concatenate([lengths, lengths + 1]), 13)


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
        max_segments: Most segments in one bin.
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
    histogram = np.zeros(seq_len + 1, np.int64)
    bad = _count(lengths, histogram) if lengths.size else -1
    if bad >= 0:
        raise SegmentTooLongError(
            f"lengths[{bad}]: {lengths[bad]} tokens; expected 1 to {seq_len}. Cut segments to seq_len before packing."
        )
    return np.ascontiguousarray(lengths, np.int32), histogram


def _best_plan(histogram: np.ndarray, max_segments: int, bound: int) -> Plan:
    """Return the plan with the fewest bins; the search of full patterns runs where the others miss the bound."""
    best = _greedy_plan(histogram, max_segments, bound)
    if best.num_bins > bound:
        exact, left = fill_exactly(histogram, max_segments)
        rest = _greedy_plan(left, max_segments, bound - exact.num_bins)
        best = min(best, join(exact, rest), key=lambda plan: plan.num_bins)
    return best


def _greedy_plan(histogram: np.ndarray, max_segments: int, bound: int) -> Plan:
    plans = [Plan(*_decreasing(histogram, max_segments, best_fit)) for best_fit in (False, True)]
    if min(plan.num_bins for plan in plans) > bound:
        plans.append(fill_longest(histogram, max_segments))
    return min(plans, key=lambda plan: plan.num_bins)


def _deal_out(lengths: np.ndarray, histogram: np.ndarray, plan: Plan, seed: int | None) -> Bins:
    """Give each place of a plan a segment of its length."""
    grouped = _grouped(lengths, histogram, seed)
    # Allocated here, not in a kernel: numpy asks for huge pages.
    bins = Bins(np.empty(len(lengths), np.int64), np.zeros(plan.num_bins + 1, np.int64))
    _emit(plan, np.cumsum(histogram) - histogram, grouped, *bins)
    return bins


def _grouped(keys: np.ndarray, histogram: np.ndarray, seed: int | None) -> np.ndarray:
    """Segment indices by rising key, equal keys dealt at random by seed or, without one, in input order."""
    grouped = np.empty(len(keys), np.int32)
    free = (np.cumsum(histogram) - histogram).astype(np.int32)
    _group(keys, free, grouped)  # leaves in `free` where each key ends
    if seed is not None:
        _deal(grouped, free, np.uint64(seed % 2**64))
    return grouped


@njit(cache=True)
def _count(lengths: np.ndarray, histogram: np.ndarray) -> int:
    """Add lengths to their histogram; return the index of the first that is out of range, or -1."""
    for i in range(len(lengths)):
        length = lengths[i]
        if length < 1 or length >= len(histogram):
            return i
        histogram[length] += 1
    return -1


@njit(cache=True)
def _decreasing(histogram: np.ndarray, max_segments: int, best_fit: bool) -> np.ndarray:
    """Place runs of equal lengths, longest first, into the first bins that fit or those that fit best.

    A node stands for a run of neighbouring bins with the same content. The one chosen stays the choice until each of
    its bins has taken all it can: the segments left fill `full` of them that far, and perhaps one more in part.
    """
    seq_len = len(histogram) - 1
    parent, length, take, bins = [0], [0], [0], [histogram.sum() + 1]  # node 0: empty bins, never used up
    first, room, held, link = [0], [seq_len], [0], [-1]
    waiting = np.full(seq_len + 1, -1, np.int64)  # by room: list of nodes too full for the lengths so far
    fitting = [(_choice(0, seq_len, best_fit), 0)]  # heap of nodes with room for this length
    for size in range(seq_len, 0, -1):
        node = waiting[size]
        while node >= 0:
            heappush(fitting, (_choice(first[node], size, best_fit), node))
            node = link[node]
        left = histogram[size]
        while left > 0:
            node = heappop(fitting)[1]
            most = min(room[node] // size, max_segments - held[node])
            full = min(bins[node], left // most)
            for count, each in ((full, most), (1, left - full * most)):
                if count == 0 or each == 0 or bins[node] == 0:
                    continue
                child = len(parent)
                parent.append(node)
                length.append(size)
                take.append(each)
                bins.append(count)
                first.append(first[node])
                room.append(room[node] - each * size)
                held.append(held[node] + each)
                link.append(-1)
                bins[node] -= count
                first[node] += count
                left -= count * each
                if held[child] == max_segments:
                    continue
                if room[child] >= size:
                    heappush(fitting, (_choice(first[child], room[child], best_fit), child))
                else:
                    link[child] = waiting[room[child]]
                    waiting[room[child]] = child
            if bins[node] > 0:
                heappush(fitting, (_choice(first[node], room[node], best_fit), node))
    bins[0] = 0
    plan = np.empty((4, len(parent)), np.int32)
    for node in range(len(parent)):
        plan[0, node], plan[1, node], plan[2, node], plan[3, node] = parent[node], length[node], take[node], bins[node]
    return plan


@njit(cache=True)
def _choice(first: int, room: int, best_fit: bool) -> int:
    """What a run of bins is chosen by, the lowest first: its place, or before that its room."""
    return (room << 40) + first if best_fit else first


@njit(cache=True)
def _group(lengths: np.ndarray, free: np.ndarray, order: np.ndarray) -> None:
    """Counting sort: fill `order` with segment indices by rising length; `free` holds where each length starts."""
    for i in range(len(lengths)):
        slot = free[lengths[i]]
        order[slot] = i
        free[lengths[i]] = slot + 1


@njit(cache=True)
def _deal(order: np.ndarray, ends: np.ndarray, seed: np.uint64) -> None:
    """Shuffle `order` inside each length (Fisher-Yates: the slots of one length fit the cache, all would not)."""
    state = seed
    start = 0
    for end in ends:
        for k in range(end - start - 1, 0, -1):
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            other = start + np.int64(((state >> np.uint64(32)) * np.uint64(k + 1)) >> np.uint64(32))
            order[start + k], order[other] = order[other], order[start + k]
        start = end


@njit(cache=True)
def _emit(plan: Plan, free: np.ndarray, grouped: np.ndarray, order: np.ndarray, offsets: np.ndarray) -> None:
    """Write out the bins of a plan, taking segments of each length in the order of `grouped`."""
    parent, length, take, bins = plan
    at = 0
    num_bins = 0
    for leaf in range(len(parent)):
        held = 0
        node = leaf
        while node > 0:
            held += take[node]
            node = parent[node]
        for done in range(0, bins[leaf], BLOCK):
            block = min(BLOCK, bins[leaf] - done)
            for b in range(block):
                num_bins += 1
                offsets[num_bins] = at + (b + 1) * held
            first = at
            node = leaf
            while node > 0:  # length by length: reads run on, and the block's writes stay in the cache
                slot = free[length[node]]
                for b in range(block):
                    for k in range(take[node]):
                        order[first + b * held + k] = grouped[slot]
                        slot += 1
                free[length[node]] = slot
                first += take[node]
                node = parent[node]
            at += block * held


@njit(cache=True)
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
