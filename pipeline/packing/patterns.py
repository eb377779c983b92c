"""Bins for lengths that first-fit packs badly: a search for full patterns on the histogram.

A pattern is a multiset of lengths that fill a bin; it is used for many bins at once. `fill_exactly` sweeps over the
lengths and completes each to exactly full bins with random partners, drawn more often the more of their kind is still
left: all kinds then run out together, where greedy searches eat what the rest would have needed. `fill_longest` is the
minimum bin slack heuristic (Gupta and Ho 1999), right for a remainder. On lengths around 0.3 of capacity, where
best-fit decreasing stays 1.8 % above the bound, both together come to 0.03 %. Budgets count search nodes, never time,
and draws come from a fixed seed: the result is a function of the histogram, the same on every machine.
"""

import numpy as np

from pipeline.packing.kernels import inner, kernel
from pipeline.packing.tree import PackingTree

EXACT_NODES = 1 << 20
"Search nodes of `fill_exactly`, besides four a sweep for each distinct length."
LONGEST_NODES = 1 << 20
"Search nodes of `fill_longest`; what is then left takes the longest that fits."
PATTERN_NODES = 1 << 10
"Search nodes of `fill_longest` for one pattern."
SWEEPS = 32
"Times that `fill_exactly` goes over all lengths, each to lead a quarter of the bins it still could."
ATTEMPTS = 32
"Draws of partners for one lead."
KINDS = 64
"Classes of length that are to run out together."
DRAWS = 2048
"Quantiles from which partners are drawn."


def fill_exactly(histogram: np.ndarray, max_segments: int) -> tuple[PackingTree, np.ndarray]:
    """Pack what fills bins to the last token, in proportion to what there is.

    Args:
        histogram: Segments of each length; int64, shape (seq_len + 1,).
        max_segments: Maximum number of segments in one bin.

    Returns:
        The packing, and the histogram of the segments that are left, int64 (seq_len + 1,).
    """
    budget = EXACT_NODES + 4 * SWEEPS * int(np.count_nonzero(histogram))
    tree, num_nodes, left = _fill_exactly(histogram, max_segments, budget)
    return PackingTree(*tree[:, :num_nodes]), left


def fill_longest(histogram: np.ndarray, max_segments: int) -> PackingTree:
    """Pack all: in each bin the longest segment left, then the fullest completion a bounded search finds.

    Args:
        histogram: Segments of each length; int64, shape (seq_len + 1,).
        max_segments: Maximum number of segments in one bin.
    """
    tree, num_nodes = _fill_longest(histogram, max_segments, LONGEST_NODES)
    return PackingTree(*tree[:, :num_nodes])


def _steps_of_exact_fill(histogram: np.ndarray, _: int, budget: int) -> int:
    sweep = len(histogram) + 20 * ATTEMPTS * int(np.count_nonzero(histogram))
    return min(5 * budget + SWEEPS * len(histogram), SWEEPS * sweep)


@inner
def _longest(left: np.ndarray, below: np.ndarray, limit: int) -> int:
    """Longest length up to `limit` with segments left; 0 where there is none."""
    size = limit
    while True:
        while below[size] != size:  # skips lengths used up for good, halving the path for the next call
            below[size] = below[below[size]]
            size = below[size]
        if left[size] > 0:  # left[0] is 1
            return size
        size -= 1


@inner
def _draw(state: np.ndarray) -> int:
    """Draw 32 random bits."""
    state[0] = state[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return int(state[0] >> np.uint64(32))


@inner
def _start(histogram: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return what is left of each length, and by length the longest at or below it."""
    left = histogram.copy()
    left[0] = 1
    below = np.arange(len(left))
    for size in range(len(left)):
        if left[size] == 0:
            below[size] = size - 1
    return left, below


@inner
def _use(
    pattern: np.ndarray, part: int, left: np.ndarray, below: np.ndarray, held: np.ndarray, tree: np.ndarray, node: int
) -> int:
    """Add to the tree 1 / `part` of the bins that a pattern could fill, at least one; return its next free node."""
    for size in pattern:
        held[size] += 1
    num_bins = left[pattern[0]]
    for size in pattern:
        num_bins = min(num_bins, left[size] // held[size])
    num_bins = (num_bins + part - 1) // part
    parent = 0
    for size in pattern:
        if held[size] == 0:
            continue
        tree[0, node] = parent
        tree[1, node] = size
        tree[2, node] = held[size]
        tree[3, node] = 0
        parent = node
        node += 1
        left[size] -= num_bins * held[size]
        if left[size] == 0:
            below[size] = size - 1
        held[size] = 0
    tree[3, parent] = num_bins
    return node


@kernel(lambda histogram, max_segments, budget: 5 * min(budget, PATTERN_NODES * int(histogram.sum())))
def _fill_longest(histogram: np.ndarray, max_segments: int, budget: int) -> tuple[np.ndarray, int]:
    seq_len = len(histogram) - 1
    left, below = _start(histogram)
    held = np.zeros(seq_len + 1, np.int64)
    stack = np.empty(seq_len + 1, np.int64)
    best = np.empty(seq_len + 1, np.int64)
    tree = np.empty((4, histogram.sum() + 1), np.int32)  # as much as it could need; what stays unused is never touched
    tree[:, 0] = 0
    node = shortest = 1
    while True:
        stack[0] = _longest(left, below, seq_len)
        if stack[0] == 0:
            return tree, node
        while left[shortest] == 0:
            shortest += 1
        depth, nodes = _fullest(stack, best, left, below, shortest, max_segments, min(budget, PATTERN_NODES))
        budget -= nodes
        node = _use(best[:depth], 1, left, below, held, tree, node)


@inner
def _fullest(
    stack: np.ndarray,
    best: np.ndarray,
    left: np.ndarray,
    below: np.ndarray,
    shortest: int,
    max_segments: int,
    budget: int,
) -> tuple[int, int]:
    """Search depth first, longest next, for the pattern led by `stack[0]` that leaves least room.

    Returns:
        How many lengths of `best` make the pattern, and the nodes visited.
    """
    depth = best_depth = 1
    room = limit = best_room = len(left) - 1 - stack[0]
    best[0] = stack[0]
    left[stack[0]] -= 1
    nodes = 0
    while best_room > 0:
        size = _longest(left, below, min(room, limit)) if depth < max_segments else 0
        nodes += 1
        if size > 0:
            stack[depth] = size
            depth += 1
            left[size] -= 1
            room -= size
            limit = size
            if room < best_room:
                best_room, best_depth = room, depth
                for i in range(depth):
                    best[i] = stack[i]
        elif depth == 1 or nodes > budget:
            break
        else:
            depth -= 1
            size = stack[depth]
            left[size] += 1
            # A shorter one in its place only helps if what it frees, with the room there was, holds another.
            limit = size - 1 if room >= shortest else min(size - 1, room + size - shortest)
            room += size
    for i in range(depth):
        left[stack[i]] += 1
    return best_depth, nodes


@kernel(_steps_of_exact_fill)
def _fill_exactly(histogram: np.ndarray, max_segments: int, budget: int) -> tuple[np.ndarray, int, np.ndarray]:
    seq_len = len(histogram) - 1
    left, below = _start(histogram)
    held = np.zeros(seq_len + 1, np.int64)
    stack = np.empty(seq_len + 1, np.int64)
    tree = np.empty((4, min(histogram.sum(), budget + SWEEPS * np.count_nonzero(histogram)) + 1), np.int32)
    tree[:, 0] = 0
    weight = np.zeros(seq_len + 1, np.int64)
    draws = np.empty(DRAWS, np.int64)
    state = np.ones(1, np.uint64)
    node = shortest = 1
    for _ in range(SWEEPS):
        _weigh(histogram, left, weight, draws)
        if weight[-1] == 0:
            break
        while shortest < seq_len and left[shortest] == 0:
            shortest += 1
        for lead in range(seq_len, 0, -1):
            if left[lead] == 0 or budget <= 0 or seq_len - shortest < lead < seq_len:
                continue
            if left[lead] < 4 and _draw(state) & 3 >= left[lead]:
                continue  # a quarter of few is now and then one
            stack[0] = lead
            depth, nodes = _complete(stack, left, below, weight, draws, shortest, max_segments, state)
            budget -= nodes
            if depth > 0:
                node = _use(stack[:depth], 4, left, below, held, tree, node)
    left[0] = 0
    return tree, node, left


@inner
def _weigh(histogram: np.ndarray, left: np.ndarray, weight: np.ndarray, draws: np.ndarray) -> None:
    """Weigh lengths by what is left of each times, squared, how much of its kind is left; tabulate draws by weight.

    `weight` holds the sums up to each length, `draws` the length at each of its quantiles.
    """
    seq_len = len(left) - 1
    width = seq_len // KINDS + 1
    for kind in range(1, seq_len + 1, width):
        stop = min(kind + width, seq_len + 1)
        share = (left[kind:stop].sum() << 10) // max(1, histogram[kind:stop].sum())
        for size in range(kind, stop):
            weight[size] = weight[size - 1] + left[size] * share * share
    size = 0
    for i in range(len(draws)):
        while size < seq_len and weight[size] * len(draws) <= weight[-1] * i:
            size += 1
        draws[i] = size


@inner
def _complete(
    stack: np.ndarray,
    left: np.ndarray,
    below: np.ndarray,
    weight: np.ndarray,
    draws: np.ndarray,
    shortest: int,
    max_segments: int,
    state: np.ndarray,
) -> tuple[int, int]:
    """Fill a bin led by `stack[0]` to the last token, partners drawn by weight, the last one taken where it fits.

    For capacity 100, a lead of 55 and lengths 30, 20, 15 and 7 left, an attempt may go: room 45, the longest that fits
    is 30, not exactly 45, so a partner is drawn from lengths up to 45 - 7 (another must still fit): 30; room 15 is
    there exactly: (55, 30, 15). Had 20 been drawn, room 25 would go on with 20 or 7, and end in a failed attempt.

    Returns:
        How many lengths of `stack` make the pattern (0 where no attempt succeeded), and the nodes visited.
    """
    nodes = 0
    left[stack[0]] -= 1
    for _ in range(ATTEMPTS):
        depth = 1
        room = len(left) - 1 - stack[0]
        while room > 0 and depth < max_segments:
            nodes += 1
            draw = _draw(state)
            size = _longest(left, below, room)
            if size < room or (draw & 3 == 0 and room >= 2 * shortest):  # now and then draw although one would fit
                among = weight[room - shortest] * len(draws) // weight[-1] if room >= 2 * shortest else 0
                size = _longest(left, below, draws[((draw >> 2) * among) >> 30]) if among > 0 else 0
                if size == 0:
                    break
            stack[depth] = size
            depth += 1
            left[size] -= 1
            room -= size
        for i in range(1, depth):
            left[stack[i]] += 1
        if room == 0:
            break
    left[stack[0]] += 1
    return depth if room == 0 else 0, nodes
