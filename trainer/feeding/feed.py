"""Pack ids to micro-batches on a device, prepared ahead by one thread.

The thread copies packs into a few reusable host buffers and asks the kernel for the rows to come; the caller's thread
only starts the copy to the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from shards import Dataset
from shards.cost import PAD_MULTIPLE, attention_pairs, padded_length
from shards.fetching.ahead import ReadAhead
from trainer.batch import Batch, HostBuffers, Shape
from trainer.model.rectangles import plan_rectangles

if TYPE_CHECKING:
    from trainer.feeding.redraw import RedrawnPacks

Note = TypeVar("Note")

PREFETCH = 2  # batches prepared ahead: one is enough to hide the copy, the second hides a slow page
ADVISED_PACKS = 16  # packs that the kernel is asked to read ahead


class SourceNumbers:
    """The sources of a dataset, numbered.

    Args:
        runs: (name, first pack, stop pack) of every run of packs from one source, in the order of packs. Ids beyond the
            last count on in further passes over them.
    """

    def __init__(self, runs: Sequence[tuple[str, int, int]]) -> None:
        self.names = list(dict.fromkeys(name for name, _, _ in runs))
        self._first = np.array([first for _, first, _ in runs], np.int64)
        self._number = np.array([self.names.index(name) for name, _, _ in runs], np.int64)
        self._num_packs = runs[-1][2]

    def of(self, packs: np.ndarray) -> np.ndarray:
        """Return the number of each pack's source; int64, same shape."""
        numbers: np.ndarray = self._number[np.searchsorted(self._first, packs % self._num_packs, side="right") - 1]
        return numbers


def whole_dataset(
    dataset: Dataset, tokens_per_batch: int, rank: int, world_size: int
) -> Iterator[tuple[np.ndarray, None]]:
    """Deal every pack once, in order, the same number of micro-batches to every process.

    Processes that come out short get a pack without targets (~id), so that their collectives match the others'.
    """
    if dataset.packer == "bucketed":
        padded = padded_length(dataset.index.max_seqlen, dataset.seq_len)
        order = np.argsort(padded, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(padded[order])) + 1)
        batches = [rows for group in groups for rows in _cut(group, tokens_per_batch // int(padded[group[0]]))]
    else:
        batches = _cut(np.arange(len(dataset)), tokens_per_batch // dataset.seq_len)
    for start in range(0, len(batches), world_size):
        yield (batches[start + rank] if start + rank < len(batches) else np.array([~0])), None


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def feed(
    dataset: Dataset,
    batches: Iterable[tuple[np.ndarray, Note]],
    tokens_per_batch: int,
    device: torch.device,
    static_shapes: bool = False,
    sliding_window: int | None = None,
    rectangles: bool = False,
    sources: SourceNumbers | None = None,
    drawn: RedrawnPacks | None = None,
) -> Iterator[tuple[Batch, Note]]:
    """Turn pack ids into micro-batches on a device, prepared ahead by one thread.

    Args:
        batches: Pack ids of each micro-batch and something to hand on with it; consumed by the thread.
        sources: Adds `sources` to each micro-batch: for each token the number of the source that it comes from.
        drawn: Where packs are drawn anew, what the ids mean; None for the packs of the dataset.
        tokens_per_batch: Most tokens of a micro-batch, padding included.
        static_shapes: Fill every micro-batch of a packed dataset up to the same length.
        sliding_window: Sliding window for `window_pairs`.

    Yields:
        The micro-batch (see `HostBuffers.to_device`) with `num_tokens`, `num_targets`, `attention_pairs` and
        `window_pairs` as ints, and what came with its ids. Its tensors belong to the caller.
    """
    read = dataset if drawn is None else drawn
    filler = _Filler(dataset, read, tokens_per_batch, static_shapes, sliding_window, sources)
    source, ahead = ReadAhead(batches, dataset.shards, dataset.mirror), deque[tuple[np.ndarray, Note]]()
    distance = max(PREFETCH, ADVISED_PACKS * dataset.seq_len // tokens_per_batch)

    def prepare(buffers: HostBuffers) -> tuple[HostBuffers, Batch, int, Note] | None:
        while len(ahead) < distance and (item := next(source, None)) is not None:
            packs = np.where(item[0] < 0, ~item[0], item[0])
            read.check_hashes(packs)
            read.advise(packs)
            ahead.append(item)
        if not ahead:
            return None
        rows, note = ahead.popleft()
        figures, num_rows = filler.fill(buffers, rows)
        if rectangles and num_rows == 1:
            figures["rectangles"] = plan_rectangles(buffers.cu[: buffers.num_offsets])
        return buffers, figures, num_rows, note

    thread = ThreadPoolExecutor(1, "prefetch", initializer=_use_device, initargs=(device,))
    try:
        pending = deque(thread.submit(prepare, filler.buffers(pin=device.type == "cuda")) for _ in range(PREFETCH + 1))
        while (prepared := pending.popleft().result()) is not None:
            buffers, figures, num_rows, note = prepared
            if (planned := figures.get("rectangles")) is not None:
                figures["rectangles"] = planned.to(device)
            batch = buffers.to_device(device, num_rows) | figures
            pending.append(thread.submit(prepare, buffers))
            yield batch, note
    finally:
        source.close()
        thread.shutdown(cancel_futures=True)


def _use_device(device: torch.device) -> None:
    """Make a device the current one of this thread: each thread has its own, and starts with the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class _Filler:
    """Fills host buffers with packs of one dataset."""

    def __init__(
        self,
        dataset: Dataset,
        read: Dataset | RedrawnPacks,
        tokens_per_batch: int,
        static_shapes: bool,
        sliding_window: int | None,
        sources: SourceNumbers | None,
    ) -> None:
        self.dataset, self.read, self.sliding_window, self.sources = dataset, read, sliding_window, sources
        self.capacity = tokens_per_batch
        self.padded = padded_length(dataset.index.max_seqlen, dataset.seq_len) if dataset.packer == "bucketed" else None
        self.fill_to = tokens_per_batch // dataset.seq_len * dataset.seq_len if static_shapes else None
        maxima = dataset.manifest["maxima"]
        self.longest = maxima["max_seqlen"]
        self.most_segments = maxima["num_segments"] if isinstance(read, Dataset) else read.most_segments

    def buffers(self, pin: bool) -> HostBuffers:
        pack, most = self.dataset.pack(0), self.most_segments
        rows = self.capacity // (PAD_MULTIPLE if self.padded is not None else self.dataset.seq_len)
        types = pack.input_ids.dtype, pack.position_ids.dtype
        with_sources, with_weights = self.sources is not None, pack.loss_weights is not None
        return HostBuffers(self.capacity, rows * most + 1, *types, pin, with_sources, with_weights)

    def fill(self, buffers: HostBuffers, rows: np.ndarray) -> tuple[Batch, int]:
        """Copy packs into the buffers; return the host's figures of the micro-batch, and its rows."""
        masked = rows < 0
        ids = np.where(masked, ~rows, rows)
        packs = [self.read.pack(int(i)) for i in ids]
        shape = Shape(
            fill_to=self.fill_to if self.padded is None else None,
            row_len=None if self.padded is None else int(self.padded[ids[0]]),
            longest=self.longest,
        )
        index = self.read.index.take(ids) if isinstance(self.read, Dataset) else self.read.take(ids)
        sources = None if self.sources is None else self.sources.of(ids)
        buffers.fill(packs, int(index.max_seqlen.max()), shape, masked, sources)
        lengths = np.concatenate([np.diff(pack.cu_seqlens) for pack in packs])
        figures = {
            "num_tokens": int(index.num_tokens.sum()),
            "num_targets": int(index.num_targets[~masked].sum()),
            "attention_pairs": int(index.attention_pairs.sum()),
            "window_pairs": int(attention_pairs(lengths, self.sliding_window).sum()),
        }
        return figures, 1 if self.padded is None else len(packs)
