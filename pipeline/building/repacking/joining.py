"""The documents of a window as they were tokenized, joined from the segments that were packed."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.tokens import Documents
from shards.reader import Dataset
from shards.shard import ArrowBatch


@dataclass(frozen=True)
class StoredWindow:
    """The documents of one window, joined from the segments that were packed."""

    documents: Documents
    first_offsets: np.ndarray
    "Place of each document's first token in the document as it was tokenized; int64 (num_documents,)."
    first_targets: np.ndarray
    "1 where that token was a target before a cut; uint8 (num_documents,)."
    first_weights: np.ndarray | None
    "The weight of that target; float16 (num_documents,), None in a dataset without weights."


def join_documents(dataset: Dataset, number: int) -> StoredWindow:
    """Return the documents of a window as they were tokenized, in their order.

    A document of 10 tokens that was cut at 6 lies in two packs, as (offset 0, 6 tokens) and (offset 6, 4 tokens):
    sorted by document and offset, its pieces stand behind each other, and their tokens end to end are the document.

    Raises:
        FormatError: The window's shard is damaged.
    """
    first, rows = int(dataset.shards.columns["first_pack"][number]), dataset.shards[number]["rows"]
    # the whole shard of its first pack: a flipped bit would be written on with a hash that fits
    dataset.check_hashes(range(first, first + min(1, rows)))
    batches = [batch for _, batch in dataset.batches(number)]
    tokens = np.cumsum([0, *(len(batch.lists["input_ids"][0]) for batch in batches)])
    bounds = [_segments(batch, start) for batch, start in zip(batches, tokens, strict=False)]
    starts = _joined([begins for begins, _ in bounds], np.int64)

    def column(name: str, dtype: Any = np.int64) -> np.ndarray:
        return _joined([batch.lists[name][0] for batch in batches], dtype)

    lengths = column("segment_lens") if dataset.layout.align > 1 else _joined([each for _, each in bounds], np.int64)
    ids, parts, offsets, cut_targets = map(column, ("doc_ids", "doc_parts", "doc_offsets", "start_targets"))
    order = np.lexsort((offsets, parts, ids))
    ids, parts, offsets, cut_targets = ids[order], parts[order], offsets[order], cut_targets[order]
    lengths = lengths[order]
    new = np.ones(len(order), bool)
    new[1:] = (ids[1:] != ids[:-1]) | (parts[1:] != parts[:-1])
    heads = np.flatnonzero(new)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    numbers = np.repeat(np.arange(len(batches)), [len(begins) for begins, _ in bounds])[order]
    begins = starts[order] - tokens[numbers]
    spans = list(zip(numbers.tolist(), begins.tolist(), (begins + lengths).tolist(), strict=True))
    mask = weights = cut_weights = None
    if dataset.layout.loss_mask:
        mask = _collect(batches, "loss_mask", spans, np.uint8)
        mask[ends[:-1]] = cut_targets
    if dataset.layout.loss_weights:
        weights = _collect(batches, "loss_weights", spans, np.float16)
        cut_weights = column("start_weights", np.float16)[order]
        weights[ends[:-1]] = cut_weights
    documents = Documents(
        input_ids=_collect(batches, "input_ids", spans, np.int32),
        offsets=np.append(ends[heads], ends[-1]),
        doc_ids=ids[heads],
        loss_mask=mask,
        loss_weights=weights,
        doc_parts=parts[heads].astype(np.int32) if parts.any() else None,
    )
    if dataset.plan["turn_ends"]:
        turns = _joined([_turns(batch, start) for batch, start in zip(batches, tokens, strict=False)], np.int64)
        documents = _with_turns(documents, turns, starts, order, ends)
    first_weights = None if cut_weights is None else cut_weights[heads]
    return StoredWindow(documents, offsets[heads], cut_targets[heads].astype(np.uint8), first_weights)


def _with_turns(
    documents: Documents, turns: np.ndarray, starts: np.ndarray, order: np.ndarray, ends: np.ndarray
) -> Documents:
    """Add where turns end, given as places among the tokens of all packs of the window."""
    segment = np.searchsorted(starts, turns, side="left") - 1  # a turn may end where its segment does
    place = np.empty(len(order), np.int64)
    place[order] = ends[:-1]
    joined = np.sort(place[segment] + turns - starts[segment])
    owner = np.searchsorted(documents.offsets, joined, side="left") - 1
    counts = np.bincount(owner, minlength=len(documents.doc_ids))
    return documents._replace(
        turn_ends=(joined - documents.offsets[owner]).astype(np.int32),
        turn_offsets=np.concatenate([[0], np.cumsum(counts)]),
    )


def _collect(batches: list[ArrowBatch], name: str, spans: list[tuple[int, int, int]], dtype: Any) -> np.ndarray:
    """Return slices (batch, begin, end) end to end: one copy each, which beats an index for every token."""
    values = [batch.lists[name][0] for batch in batches]
    return _joined([values[batch][begin:end] for batch, begin, end in spans], dtype)


def _segments(batch: ArrowBatch, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each segment of a batch begins, counted from its first token on as `first`, and its length."""
    bounds, offsets = batch.lists["cu_seqlens"]
    bounds = bounds + first + np.repeat(batch.lists["input_ids"][1][:-1].astype(np.int64), np.diff(offsets))
    inside = np.ones(len(bounds), bool)
    inside[offsets[1:] - 1] = False  # the last bound of a pack begins no segment
    begins = np.flatnonzero(inside)
    return bounds[begins], bounds[begins + 1] - bounds[begins]


def _turns(batch: ArrowBatch, first: int) -> np.ndarray:
    """Return where turns end in a batch, counted from its first token on as `first`."""
    ends, offsets = batch.lists["turn_ends"]
    return ends + first + np.repeat(batch.lists["input_ids"][1][:-1].astype(np.int64), np.diff(offsets))


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
