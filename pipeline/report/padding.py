"""What the same segments would cost if they were padded instead of packed.

A way of feeding is described by its attention rows alone: how many rows of which length the model computes. Segments
come in as a histogram, and every answer is exact for it (an expectation where batches are drawn at random), in closed
form: nothing is sampled, and a billion segments cost as much as a thousand. Add a variant as an entry of `FEEDINGS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pipeline.report.flops import ModelShape
from shards.cost import attention_pairs, padded_length

BATCH = 16  # rows of a padded batch, as people run them


class Rows(NamedTuple):
    """Attention rows by length; both float64 (n,), lengths rising."""

    lengths: np.ndarray
    "Tokens that a row computes, padding included."
    rows: np.ndarray
    "How many such rows there are."

    @property
    def slots(self) -> float:
        """Tokens computed, padding included."""
        return float(np.dot(self.lengths, self.rows))

    @property
    def pairs(self) -> float:
        """Attention pairs computed."""
        return float(np.dot(attention_pairs(self.lengths), self.rows))


def bucketed(segments: Rows, seq_len: int) -> Rows:
    """Pad every segment to the next multiple that a bucketed dataset groups its rows by."""
    return Rows(padded_length(np.ceil(segments.lengths), seq_len).astype(np.float64), segments.rows)


def pad_to_max(segments: Rows, seq_len: int) -> Rows:
    """Pad every segment to `seq_len`."""
    return Rows(np.array([float(seq_len)]), np.array([segments.rows.sum()]))


def pad_to_longest(segments: Rows, seq_len: int) -> Rows:
    """Pad to the longest segment of a random batch; the expected rows, drawn without replacement.

    The longest of B segments is at most x with probability C(segments of at most x, B) / C(all segments, B).
    """
    total = segments.rows.sum()
    batches, rest = divmod(int(total), BATCH)
    expected = np.zeros(len(segments.rows))
    for size, times in ((BATCH, batches), (rest, 1)):
        if size and times:
            below = np.cumsum(segments.rows)
            draw = np.arange(size)
            chance = np.prod(np.maximum(below[:, None] - draw, 0) / (total - draw), axis=1)
            expected += np.diff(chance, prepend=0.0) * size * times
    return Rows(segments.lengths, expected)


def length_buckets(segments: Rows, seq_len: int) -> Rows:
    """Sort by length, then pad each batch of neighbours to its longest segment."""
    total = int(segments.rows.sum())
    below = np.cumsum(segments.rows).astype(np.int64)
    batches = below // BATCH  # full batches whose last, longest segment is at most this long
    rows = np.diff(batches, prepend=0) * float(BATCH)
    if total % BATCH:
        rows[-1] += total % BATCH
    return Rows(segments.lengths, rows)


FEEDINGS: dict[str, Callable[[Rows, int], Rows]] = {
    "pad to seq_len": pad_to_max,
    "pad to longest of 16": pad_to_longest,
    "length buckets of 16": length_buckets,
}


def compare(segments: Rows, seq_len: int, shape: ModelShape, packer: str = "auto") -> list[dict[str, Any]]:
    """Return, for a dataset as it is and for each of `FEEDINGS`, what it computes and how many times dearer that is.

    Args:
        segments: Segments by length.
        seq_len: Capacity of a pack, in tokens.
        shape: The model whose FLOPs weigh tokens against attention pairs.
        packer: The dataset's; the first record is called after it where it does not pack.

    Returns:
        One record per way: name, slots (tokens computed), padding (share of slots), attention_pairs, relative_cost
        (training FLOPs against the first: the speed-up that packing implies where FLOPs decide).
    """
    own = packer if packer in ("bucketed", "unpacked") else "packed"
    as_it_is = bucketed(segments, seq_len) if packer == "bucketed" else segments
    cost = shape.cost.flops_of(*as_it_is)
    ways = {own: as_it_is} | {name: feed(segments, seq_len) for name, feed in FEEDINGS.items() if cost}
    return [
        {
            "name": name,
            "slots": round(rows.slots),
            "padding": 1.0 - segments.slots / rows.slots if rows.slots else 0.0,
            "attention_pairs": round(rows.pairs),
            "relative_cost": shape.cost.flops_of(*rows) / cost if cost else 1.0,
        }
        for name, rows in ways.items()
    ]
