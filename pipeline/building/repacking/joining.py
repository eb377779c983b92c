"""The documents of a window as they were tokenized, joined from the segments that were packed."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.tokens import Documents
from shards.reader import Dataset


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
    first = int(dataset.shards.columns["first_pack"][number])
    packs = range(first, first + dataset.shards[number]["rows"])
    dataset.check_hashes(packs[:1])  # its whole shard: a flipped bit would be written on with a hash that fits
    rows = [dataset[pack] for pack in packs]
    tokens = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    bounds = [row["cu_seqlens"].astype(np.int64) + start for row, start in zip(rows, tokens, strict=False)]
    starts = _joined([each[:-1] for each in bounds], np.int64)
    real = [row["segment_lens"] for row in rows] if dataset.layout.align > 1 else map(np.diff, bounds)
    lengths = _joined(list(real), np.int64)
    ids, parts, offsets, cut_targets = (
        _joined([row[name] for row in rows], np.int64)
        for name in ("doc_ids", "doc_parts", "doc_offsets", "start_targets")
    )
    order = np.lexsort((offsets, parts, ids))
    ids, parts, offsets, cut_targets = ids[order], parts[order], offsets[order], cut_targets[order]
    lengths = lengths[order]
    new = np.ones(len(order), bool)
    new[1:] = (ids[1:] != ids[:-1]) | (parts[1:] != parts[:-1])
    heads = np.flatnonzero(new)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    numbers = np.repeat(np.arange(len(rows)), [len(each) - 1 for each in bounds])[order]
    begins = starts[order] - tokens[numbers]
    spans = list(zip(numbers.tolist(), begins.tolist(), (begins + lengths).tolist(), strict=True))
    mask = weights = cut_weights = None
    if dataset.layout.loss_mask:
        mask = _collect([row["loss_mask"] for row in rows], spans, np.uint8)
        mask[ends[:-1]] = cut_targets
    if dataset.layout.loss_weights:
        weights = _collect([row["loss_weights"] for row in rows], spans, np.float16)
        cut_weights = _joined([row["start_weights"] for row in rows], np.float16)[order]
        weights[ends[:-1]] = cut_weights
    documents = Documents(
        input_ids=_collect([row["input_ids"] for row in rows], spans, np.int32),
        offsets=np.append(ends[heads], ends[-1]),
        doc_ids=ids[heads],
        loss_mask=mask,
        loss_weights=weights,
        doc_parts=parts[heads].astype(np.int32) if parts.any() else None,
    )
    if dataset.plan["turn_ends"]:
        turns = _joined([row["turn_ends"] + start for row, start in zip(rows, tokens, strict=False)], np.int64)
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


def _collect(rows: list[np.ndarray], spans: list[tuple[int, int, int]], dtype: Any) -> np.ndarray:
    """Return slices (row, begin, end) end to end: one copy each, which beats an index for every token."""
    return _joined([rows[row][begin:end] for row, begin, end in spans], dtype)


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
