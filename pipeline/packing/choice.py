"""Which lengths share a bin, from their histogram alone: the decreasing heuristics, and the best of all ways."""

from collections.abc import Callable

import numpy as np

from pipeline.packing.patterns import fill_exactly, fill_longest
from pipeline.packing.tree import PackingTree, decreasing, join

NO_LIMIT = 1 << 40

MakeTree = Callable[[np.ndarray, int | None], PackingTree]
"Decides from the histogram of lengths alone which lengths each bin holds; the second argument is `max_segments`."


def first_fit_tree(histogram: np.ndarray, max_segments: int | None) -> PackingTree:
    """Place lengths from the longest on, each into the first bin with room."""
    return decreasing(histogram, max_segments or NO_LIMIT, best_fit=False)


def best_fit_tree(histogram: np.ndarray, max_segments: int | None) -> PackingTree:
    """Place lengths from the longest on, each into the fullest bin with room."""
    return decreasing(histogram, max_segments or NO_LIMIT, best_fit=True)


def best_tree(histogram: np.ndarray, limit: int | None) -> PackingTree:
    """Return the tree with the fewest bins; the search of full patterns runs where the others miss the bound."""
    bound, max_segments = histogram_bound(histogram, limit), limit or NO_LIMIT
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
