"""A packing of a length histogram as a tree of runs of equal bins; first-fit and best-fit decreasing build one.

In both, the chosen bin stays the choice until it holds no more segments of that length, so bins of equal content move
as one run and the steps depend on the distinct lengths alone. Writing the bins is one sequential pass.
"""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pipeline.packing.kernels import inner, kernel

BLOCK = 64  # bins written at a time


class PackingTree(NamedTuple):
    """A packing of a histogram: a tree of runs of equal bins, node 0 the empty bin; all int32, shape (num_nodes,)."""

    parent: np.ndarray
    "What the bins of a node held before."
    length: np.ndarray
    "Tokens of each segment they then took."
    take: np.ndarray
    "How many such segments each of them took."
    bins: np.ndarray
    "How many bins hold exactly this in the end."

    @property
    def num_bins(self) -> int:
        """How many bins there are."""
        return int(self.bins.sum(dtype=np.int64))


def join(first: PackingTree, second: PackingTree) -> PackingTree:
    """Return one tree with the bins of both."""
    moved = second.parent[1:] + np.where(second.parent[1:] > 0, len(first.parent) - 1, 0).astype(np.int32)
    parts = [(first.parent, moved), *((a, b[1:]) for a, b in zip(first[1:], second[1:], strict=True))]
    return PackingTree(*(np.concatenate(part) for part in parts))


def decreasing(histogram: np.ndarray, max_segments: int, *, best_fit: bool) -> PackingTree:
    """Pack by first-fit decreasing, or best-fit decreasing.

    Args:
        histogram: Segments of each length; int64, shape (seq_len + 1,).
        max_segments: Maximum number of segments in one bin.
        best_fit: Choose the bin with the least room that fits, instead of the first.
    """
    return PackingTree(*_decreasing(histogram, max_segments, best_fit))


@kernel(lambda histogram, *_: len(histogram) + 20 * int(np.minimum(histogram, 4).sum()))
def _decreasing(histogram: np.ndarray, max_segments: int, best_fit: bool) -> np.ndarray:
    """Place runs of equal lengths, longest first, into the first bins that fit or those that fit best.

    A node stands for a run of neighbouring bins with the same content. The one chosen stays the choice until each of
    its bins has taken all it can: the segments left fill `full` of them that far, and perhaps one more in part.

    For capacity 10 and the lengths 4, 4, 4, 4, 4, 2, 2 the nodes are, as parent: length x take, bins:
        size 4: five fill two of the empty bins with two each and one in part: 1 = 0: 4x2, 2 bins; 2 = 0: 4x1, 1 bin;
        size 2: first fit chooses node 1, whose two bins have room for one each: 3 = 1: 2x1, 2 bins; 1 keeps 0 bins.
    The packing is the nodes that still have bins: two of (4, 4, 2) and one of (4).
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
            limit = min(room[node] // size, max_segments - held[node])
            full = min(bins[node], left // limit)
            for count, each in ((full, limit), (1, left - full * limit)):
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
    tree = np.empty((4, len(parent)), np.int32)
    for node in range(len(parent)):
        tree[0, node], tree[1, node], tree[2, node], tree[3, node] = parent[node], length[node], take[node], bins[node]
    return tree


@inner
def _choice(first: int, room: int, best_fit: bool) -> int:
    """What a run of bins is chosen by, the lowest first: its place, or before that its room."""
    return (room << 40) + first if best_fit else first


@kernel(lambda parent, length, take, bins, free, grouped, *_: 4 * (len(grouped) + 2 * len(parent)))
def write_bins(
    parent: np.ndarray,
    length: np.ndarray,
    take: np.ndarray,
    bins: np.ndarray,
    free: np.ndarray,
    grouped: np.ndarray,
    order: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Write the bins of a tree, taking the segments of each length in the order of `grouped`.

    Args:
        parent, length, take, bins: The columns of a `PackingTree`.
        free: Where each length starts in `grouped`; int64, shape (seq_len + 1,); used up.
        grouped: Segment indices by rising length; int32, shape (num_segments,).
        order: Gets the segment indices bin by bin; int64, shape (num_segments,).
        offsets: Gets where each bin starts in `order`, then the end; int64, shape (num_bins + 1,), all 0 before.
    """
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
