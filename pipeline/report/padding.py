"""What the same segments would cost if they were padded instead of packed.

A way of feeding is described by its attention rows alone: how many rows of which length the model computes. Segments
come in as a histogram, and every answer is exact for it (an expectation where batches are drawn at random), in closed
form: nothing is sampled, and a billion segments cost as much as a thousand. Add a variant as an entry of `PADDED`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipeline.report.feedings import BATCH
from pipeline.report.flops import ModelShape
from pipeline.report.records import FeedingFigures
from shards.cost import attention_pairs, padded_length


class LengthHistogram(NamedTuple):
    """Attention rows by length; both float64 (n,), lengths rising."""

    lengths: np.ndarray
    "Tokens that a row computes, padding included."
    counts: np.ndarray
    "How many such rows there are."

    @property
    def slots(self) -> float:
        """Tokens computed, padding included."""
        return float(np.dot(self.lengths, self.counts))

    @property
    def pairs(self) -> float:
        """Attention pairs computed."""
        return float(np.dot(attention_pairs(self.lengths), self.counts))


def round_up_lengths(segments: LengthHistogram, seq_len: int) -> LengthHistogram:
    """Pad every segment to the next multiple that a bucketed dataset groups its rows by."""
    padded = padded_length(np.ceil(segments.lengths), seq_len).astype(np.float64)
    return LengthHistogram(padded, segments.counts)


def pad_to_max(segments: LengthHistogram, seq_len: int) -> LengthHistogram:
    """Pad every segment to `seq_len`."""
    return LengthHistogram(np.array([float(seq_len)]), np.array([segments.counts.sum()]))


def pad_to_longest(segments: LengthHistogram, seq_len: int) -> LengthHistogram:
    """Pad to the longest segment of a random batch; the expected rows, drawn without replacement.

    The longest of B segments is at most x with probability C(segments of at most x, B) / C(all segments, B).
    """
    total = segments.counts.sum()
    batches, rest = divmod(int(total), BATCH)
    expected = np.zeros(len(segments.counts))
    for size, times in ((BATCH, batches), (rest, 1)):
        if size and times:
            below = np.cumsum(segments.counts)
            draw = np.arange(size)
            chance = np.prod(np.maximum(below[:, None] - draw, 0) / (total - draw), axis=1)
            expected += np.diff(chance, prepend=0.0) * size * times
    return LengthHistogram(segments.lengths, expected)


def bucket_by_length(segments: LengthHistogram, seq_len: int) -> LengthHistogram:
    """Sort by length, then pad each batch of neighbours to its longest segment."""
    total = int(segments.counts.sum())
    below = np.cumsum(segments.counts).astype(np.int64)
    batches = below // BATCH  # full batches whose last, longest segment is at most this long
    rows = np.diff(batches, prepend=0) * float(BATCH)
    if total % BATCH:
        rows[-1] += total % BATCH
    return LengthHistogram(segments.lengths, rows)


PADDED: dict[str, Callable[[LengthHistogram, int], LengthHistogram]] = {
    "padded-max": pad_to_max,
    "padded-longest": pad_to_longest,
    "length-bucketed": bucket_by_length,
}
"Names as in `feedings.FEEDINGS`."


def compare_feedings(
    segments: LengthHistogram, seq_len: int, shape: ModelShape, packer: str = "auto", packs: int = 0
) -> list[FeedingFigures]:
    """Return, for a dataset as it is and for every other way of feeding it, what that computes and costs.

    Args:
        segments: Segments by length.
        seq_len: Capacity of a pack, in tokens.
        shape: The model whose FLOPs weigh tokens against attention pairs.
        packer: The dataset's; the first record is called after it where it does not pack.
        packs: How many packs hold the segments.

    Returns:
        One record per way: name, slots (tokens computed), padding (share of slots), attention_pairs, relative_cost
        (training FLOPs relative to the first: the speed-up that packing implies where FLOPs decide).
    """
    packed = packer not in ("bucketed", "unpacked")
    own = "packed-varlen" if packed else packer
    as_it_is = round_up_lengths(segments, seq_len) if packer == "bucketed" else segments
    cost = shape.cost.flops_of(*as_it_is)
    ways = {own: as_it_is}
    if cost:
        ways |= {name: pad(segments, seq_len) for name, pad in PADDED.items()}
        if packed:
            ways["packed-dense"] = LengthHistogram(np.array([float(seq_len)]), np.array([float(packs)]))
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
