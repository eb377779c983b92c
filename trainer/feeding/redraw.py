"""Other packs in every pass: the segments of each window packed again and again, as `pack train --repack` asks.

The lengths that share a pack follow from a window's lengths alone, so every pass has the same number of packs with the
same lengths; segments of equal length change places, by a seed made of the run's, the pass and the window. Pass `k`
has the pack ids `k * len(packs)` to `(k + 1) * len(packs)`. Nothing is written: a pack is put together from the rows
that hold its segments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from pipeline.packing.packers import PACKERS, Bins, Drawing
from shards.cost import attention_pairs
from shards.errors import OptionError
from shards.reader import Dataset, Pack
from shards.shard import ArrowBatch
from shards.tables.index import Index

STREAM = 2  # of random numbers, beside those of the orders
KEPT_PASSES = 2  # of each window: batches are prepared ahead into the next one


class _Segments(NamedTuple):
    """Figures per segment, in the order in which the shards hold them; each (num_segments,)."""

    tokens: np.ndarray
    "int32"
    targets: np.ndarray
    "int32"
    weights: np.ndarray | None
    "float64: sum of the loss weights; None in a dataset without them"


class RedrawnPacks:
    """The packs of a dataset, drawn anew in each pass; read like the packs of a `Dataset`.

    Takes 8 bytes of memory a segment for its figures (16 with weights) and 8 for each pass that is under way, and reads
    boundaries and masks of all shards once.

    Args:
        dataset: What the segments come from.
        seed: Of all draws.

    Raises:
        OptionError: The packs of this dataset cannot be drawn anew.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        make_tree = PACKERS[dataset.packer].make_tree if dataset.packer in PACKERS else None
        if make_tree is None:
            raise OptionError(
                "repack",
                f'the packs of a dataset of `packer="{dataset.packer}"` follow from the order of its documents; '
                "expected auto, ffd or bfd. Make such a dataset with pack repack.",
            )
        if dataset.layout.align > 1:
            raise OptionError(
                "repack",
                f"its segments are padded to multiples of {dataset.layout.align} tokens; expected none that are. Make "
                "a dataset without `align` with pack repack.",
            )
        if dataset.mirror is not None:
            raise OptionError(
                "repack", f"{dataset.location} is read shard by shard; expected a directory. Copy the dataset here."
            )
        self.dataset, self.seed = dataset, seed
        shards, limit = range(len(dataset.shards)), dataset.plan["packer"]["max_segments"]
        packs = [*dataset.shards.first_packs.tolist(), len(dataset)]
        self._first_segment = np.concatenate([[0], np.cumsum(dataset.index.num_segments, dtype=np.int64)])
        "Of each stored pack, and one past the last segment."
        self._segments = _segments_of(dataset)
        self._window_segments = self._first_segment[packs]
        "First segment of each window, and one past the last."
        self._drawings = [
            Drawing(self._segments.tokens[slice(*self._window_segments[k : k + 2])], dataset.seq_len, make_tree, limit)
            for k in shards
        ]
        self._first_pack = np.concatenate([[0], np.cumsum([each.num_bins for each in self._drawings], dtype=np.int64)])
        "First drawn pack of each window, and one past the last."
        self._drawn: dict[int, OrderedDict[int, Bins]] = {window: OrderedDict() for window in shards}
        self.index = self._first_pass()
        "Figures per pack of the first pass: all but targets and weights are the same in every pass."
        drawn_at = dict(zip(packs, self._first_pack.tolist(), strict=True))
        self.sources = [(name, drawn_at[first], drawn_at[stop]) for name, first, stop in dataset.sources]
        "Name, first pack and one past the last pack of each run of packs from one source."

    def __len__(self) -> int:
        return int(self._first_pack[-1])

    @property
    def most_segments(self) -> int:
        """Most segments in a pack, of any pass."""
        return int(self.index.num_segments.max(initial=0))

    @property
    def share_movable(self) -> float:
        """Share of the segments that have another of their length in their window: only these change packs."""
        return sum(each.num_movable for each in self._drawings) / max(1, len(self._segments.tokens))

    def segments(self, pack: int) -> np.ndarray:
        """Return the segments of a pack, counted over the whole dataset as its shards hold them; int64."""
        number, place = divmod(pack, len(self))
        window = int(np.searchsorted(self._first_pack, place, side="right")) - 1
        bins, local = self._bins(window, number), place - int(self._first_pack[window])
        segments = bins.order[bins.offsets[local] : bins.offsets[local + 1]]
        return segments.astype(np.int64) + int(self._window_segments[window])

    def pack_with(self, segment: int, number: int) -> int:
        """Return the pack of pass `number` that holds a segment."""
        window = int(np.searchsorted(self._window_segments, segment, side="right")) - 1
        bins = self._bins(window, number)
        place = int(np.flatnonzero(bins.order == segment - self._window_segments[window])[0])
        local = int(np.searchsorted(bins.offsets, place, side="right")) - 1
        return number * len(self) + int(self._first_pack[window]) + local

    def stored(self, segment: int) -> tuple[int, int]:
        """Return the pack of the dataset that holds a segment, and its place among the segments there."""
        pack = int(np.searchsorted(self._first_segment, segment, side="right")) - 1
        return pack, segment - int(self._first_segment[pack])

    def segment_at(self, stored_pack: int, place: int) -> int:
        """Return the number of a segment of the dataset's packs."""
        return int(self._first_segment[stored_pack]) + place

    def take(self, packs: np.ndarray) -> Index:
        """Return the figures of some packs of any pass, in their order; at least one."""
        segments = [self.segments(pack) for pack in packs.tolist()]
        return self._figures(np.concatenate(segments), np.array([len(each) for each in segments]))

    def _first_pass(self) -> Index:
        bins = [self._bins(window, 0) for window in range(len(self._drawings))]
        chosen = [each.order + first for each, first in zip(bins, self._window_segments.tolist(), strict=False)]
        return self._figures(np.concatenate(chosen), np.concatenate([np.diff(each.offsets) for each in bins]))

    def _figures(self, chosen: np.ndarray, counts: np.ndarray) -> Index:
        """Return figures per pack.

        Args:
            chosen: Segments of each pack, end to end.
            counts: How many each has, at least one.
        """
        starts = np.cumsum(counts) - counts
        tokens, targets, weights = self._segments
        lengths, trained = tokens[chosen], targets[chosen]
        return Index(
            num_tokens=np.add.reduceat(lengths, starts, dtype=np.int32),
            num_segments=counts.astype(np.int32),
            num_targets=np.add.reduceat(trained, starts, dtype=np.int32),
            num_target_segments=np.add.reduceat(trained > 0, starts, dtype=np.int32),
            max_seqlen=np.maximum.reduceat(lengths, starts),
            attention_pairs=np.add.reduceat(attention_pairs(lengths), starts),
            weight_sum=None if weights is None else np.add.reduceat(weights[chosen], starts),
        )

    def pack(self, pack: int) -> Pack:
        """Return what training needs of one pack; copies."""
        columns: dict[str, list[np.ndarray]] = {}
        lengths = []
        for row, begin, end in self._pieces(pack):
            lengths.append(end - begin)
            for name, values in row._asdict().items():
                if values is not None and name != "cu_seqlens":
                    columns.setdefault(name, []).append(values[begin:end])
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        return Pack(**joined, cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32))

    def check_hashes(self, packs: Iterable[int]) -> None:
        """Check the shards that hold the segments of some packs against their hashes, each once.

        Raises:
            FormatError: A shard is not the one that the shard list names.
        """
        self.dataset.check_hashes(self.stored(int(self.segments(int(pack))[0]))[0] for pack in packs)

    def advise(self, packs: Iterable[int]) -> None:
        """Start reading the rows that hold the segments of some packs, without waiting."""
        rows = {self.stored(segment)[0] for pack in packs for segment in self.segments(int(pack)).tolist()}
        self.dataset.advise(sorted(rows))

    def _pieces(self, pack: int) -> Iterator[tuple[Pack, int, int]]:
        """Yield, for each segment of a pack, the row that holds it and its first and one-past-last token there."""
        for segment in self.segments(pack).tolist():
            stored, place = self.stored(segment)
            row = self.dataset.pack(stored)
            yield row, row.cu_seqlens.item(place), row.cu_seqlens.item(place + 1)

    def _bins(self, window: int, number: int) -> Bins:
        drawn = self._drawn[window]
        bins = drawn.get(number)
        if bins is None:
            seed = np.random.SeedSequence([self.seed, STREAM, number, window]).generate_state(1, np.uint64)
            bins = self._drawings[window].bins(int(seed[0]))
            drawn[number] = Bins(bins.order.astype(np.int32), bins.offsets)
            while len(drawn) > KEPT_PASSES:
                drawn.popitem(last=False)
            bins = drawn[number]
        return bins


def _segments_of(dataset: Dataset) -> _Segments:
    """Return the figures of all segments of a dataset."""
    number = int(dataset.index.num_segments.sum(dtype=np.int64))
    weighted = dataset.layout.loss_weights
    found = _Segments(
        np.empty(number, np.int32), np.empty(number, np.int32), np.empty(number, np.float64) if weighted else None
    )
    done = 0
    for shard in range(len(dataset.shards)):
        for _, batch in dataset.batches(shard):
            stop = done + len(batch.lists["doc_ids"][0])
            for column, values in zip(found, _figures_of(batch), strict=True):
                if column is not None:
                    column[done:stop] = values
            done = stop
    return found


def _figures_of(batch: ArrowBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return tokens, targets and weights of each segment of a batch."""
    cu_seqlens, rows = batch.lists["cu_seqlens"]
    tokens = batch.lists["input_ids"][1]
    ends = rows[1:] - 1  # of each row, in cu_seqlens
    starts = np.delete(cu_seqlens, ends) + np.repeat(tokens[:-1], np.diff(rows) - 1)
    lengths = np.delete(np.diff(cu_seqlens), ends[:-1])
    if not len(starts):
        return lengths, lengths, None
    mask, weights = batch.lists.get("loss_mask"), batch.lists.get("loss_weights")
    return (
        lengths,
        lengths - 1 if mask is None else np.add.reduceat(mask[0], starts, dtype=np.int32),
        None if weights is None else np.add.reduceat(weights[0], starts, dtype=np.float64),
    )
