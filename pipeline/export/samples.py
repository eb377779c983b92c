"""Packs as samples for other trainers: one dictionary of arrays a pack, without padding.

The names are those that trainers know: `labels` stand in the places of their ids, unshifted, -100 where there is no
target (transformers, TRL); `seq_lengths` are the segments of the row (TRL). Nothing precedes the first token of a
segment, so its label is -100 too, or the last token of the segment before would be trained to predict it.

    segments [5, 6, 7] and [8, 9], all trained
    input_ids [5, 6, 7, 8, 9], labels [-100, 6, 7, -100, 9], position_ids [0, 1, 2, 0, 1], seq_lengths [3, 2]
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from shards.reader import Dataset, Row
from shards.schema import TOKEN_COLUMNS

IGNORED = -100
Sample = dict[str, np.ndarray]
PROVENANCE: dict[str, type[np.generic]] = {"doc_ids": np.int64, "doc_parts": np.int32, "doc_offsets": np.int32}
"Columns that lead back to the corpus (`pack show --doc`), one value a segment."


def windows_of(dataset: Dataset) -> list[int]:
    """Return the windows that hold packs, in order."""
    windows: list[int] = np.flatnonzero(dataset.shards.columns["packs"]).tolist()
    return windows


def windows_by_source(dataset: Dataset) -> dict[str, list[int]]:
    """Return the windows that hold packs by the name of their source; each list in order."""
    found: dict[str, list[int]] = {}
    for window in windows_of(dataset):
        found.setdefault(dataset.shards[window]["source"], []).append(window)
    return found


def rows_of(dataset: Dataset, window: int) -> Iterator[Row]:
    """Yield the packs of a window with every column, padding taken out."""
    first = int(dataset.shards.columns["first_pack"][window])
    packs = range(first, first + dataset.shards[window]["rows"])
    dataset.check_hashes(packs[:1])  # its whole shard
    for pack in packs:
        yield without_padding(dataset[pack]) if dataset.layout.align > 1 else dataset[pack]


def without_padding(row: Row) -> Row:
    """Return the token columns and boundaries of an aligned pack as they were before it was padded.

    Example:
        Segments of 3 and 2 tokens, aligned to 4: `cu_seqlens` [0, 4, 8] becomes [0, 3, 5].
    """
    real = row["segment_lens"]
    kept = row["position_ids"] < np.repeat(real, np.diff(row["cu_seqlens"]))  # positions go on in padding
    tokens = {name: row[name][kept] for name in TOKEN_COLUMNS if name in row}
    return row | tokens | {"cu_seqlens": np.concatenate([[0], np.cumsum(real)]).astype(np.int32)}


def column_types(dataset: Dataset) -> dict[str, type[np.generic]]:
    """Return the columns of samples and their types."""
    weights: dict[str, type[np.generic]] = {"loss_weights": np.float32} if dataset.layout.loss_weights else {}
    tokens = dict.fromkeys(("input_ids", "labels", "position_ids", "seq_lengths"), np.int32)
    return {**tokens, **weights, **PROVENANCE}


def sample_of(row: Row) -> Sample:
    """Return a pack without padding as a sample, with the columns of `column_types`."""
    ids = row["input_ids"].astype(np.int32)
    sample: dict[str, Any] = {
        "input_ids": ids,
        "labels": np.where(row["loss_mask"] != 0, ids, np.int32(IGNORED)),
        "position_ids": row["position_ids"].astype(np.int32),
        "seq_lengths": np.diff(row["cu_seqlens"]),
    }
    if "loss_weights" in row:
        sample["loss_weights"] = row["loss_weights"].astype(np.float32)
    return sample | {name: np.asarray(row[name]) for name in PROVENANCE}


def untrained_tokens(dataset: Dataset) -> int:
    """Return how many tokens are read but not trained, the first of each document left out: nothing predicts those."""
    if not dataset.layout.loss_mask:
        return 0
    totals = dataset.manifest["totals"]
    inside = totals["tokens"]["packed"] - totals["segments"] - totals["targets"]["packed"]
    if inside or totals["segments"] == totals["documents"]["packed"]:
        return inside
    # where documents were cut, the mask of a segment's first token is kept beside the row
    rows = (row for window in windows_of(dataset) for row in rows_of(dataset, window))
    return sum(int(((row["doc_offsets"] > 0) & (row["start_targets"] == 0)).sum()) for row in rows)


def origin_of(dataset: Dataset) -> dict[str, str | int]:
    """Return what an export says about the dataset it was made of."""
    return {
        "dataset_id": dataset.dataset_id,
        "seq_len": dataset.seq_len,
        "packer": dataset.packer,
        "tokenizer_digest": dataset.manifest["tokenizer"]["digest"],
    }
