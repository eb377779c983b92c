"""`pack score`: the loss of every document under a model, by packed forward passes, as fast as an evaluation.

A batch gives the losses of its tokens; the sums over its segments stay on the device until a few hundred batches are
done. A document's loss is the sum over its segments in all packs, divided by its targets or the sum of their weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from shards import Dataset
from shards.errors import PackError
from shards.plan import corpus_id
from shards.reader import Row
from shards.tables.provenance import Provenance
from shards.tables.scores import SCHEMA
from trainer.checks import check_datasets
from trainer.config import TrainConfig
from trainer.distributed import World, gather
from trainer.documents.config import ScoreConfig
from trainer.documents.trace import DocumentName
from trainer.feeding.feed import feed, whole_dataset
from trainer.model.loss import PackedLM
from trainer.run import build_model

WORST_SHOWN = 5
BATCHES_HELD = 256  # whose sums wait on the device before they are fetched


class ScoreResult(NamedTuple):
    """What was found."""

    table: pa.Table
    "As `shards.tables.scores.SCHEMA`, ascending by document."
    loss: float
    "Mean over all targets, that of an evaluation; weighted where targets have weights."
    notes: list[str]


class _Segments(NamedTuple):
    """Figures of segments, in any order; all of the same shape."""

    doc_ids: np.ndarray
    doc_parts: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    losses: np.ndarray


def score(config: ScoreConfig, world: World, on_progress: Callable[[int, int], None] | None = None) -> ScoreResult:
    """Score every document of a dataset.

    Args:
        config: What to score.
        world: This process; all together score the dataset once, and all return the result.
        on_progress: Told the tokens done here and the tokens of the dataset.

    Raises:
        PackError: Model and dataset do not fit, or the dataset has no target.
    """
    dataset = Dataset(config.dataset)
    check_datasets(dataset, (), config.force)
    training = TrainConfig(
        dataset=config.dataset, model=config.model, out=config.out, dtype=config.dtype, attention=config.attention,
        device=config.device, force=config.force, liger="off",
    )  # fmt: skip
    lm, _, notes = build_model(training, world, [dataset])
    on = config.dtype == "bf16"
    autocast = torch.autocast(world.device.type, torch.bfloat16) if on else nullcontext()
    mine = score_segments(
        lm, dataset, world, tokens_per_batch=config.tokens_per_batch or dataset.seq_len, autocast=autocast,
        on_progress=on_progress,
    )  # fmt: skip
    parts = gather(mine, world)
    segments = _Segments(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    table = _table_of(segments, dataset, str(config.model))
    return ScoreResult(table, float(segments.losses.sum() / segments.weights.sum()), notes)


def score_segments(
    lm: PackedLM,
    dataset: Dataset,
    world: World,
    *,
    tokens_per_batch: int,
    autocast: AbstractContextManager[Any],
    on_progress: Callable[[int, int], None] | None = None,
) -> _Segments:
    """Return the figures of this process's share of the segments; losses are sums, weighted where targets are.

    `lm` is left in evaluation mode.
    """
    batches = ((rows, rows) for rows, _ in whole_dataset(dataset, tokens_per_batch, world.rank, world.size))
    found, held, done = list[_Segments](), list[torch.Tensor](), 0
    losses: list[np.ndarray] = []
    total = int(dataset.index.num_tokens.sum(dtype=np.int64))
    lm.eval()
    with torch.no_grad(), autocast:
        for batch, rows in feed(dataset, batches, tokens_per_batch, world.device, rectangles=lm.needs_rectangles):
            lm.token_losses = torch.zeros(batch["shift_labels"].numel(), device=world.device)
            lm(batch)
            token_losses = lm.token_losses
            if "shift_weights" in batch:
                token_losses = token_losses * batch["shift_weights"].flatten()
            packs = [dataset[int(row)] for row in rows if row >= 0]  # ~row only fills up a process's share
            if not packs:
                continue
            segments = _segments_of(packs)
            found.append(segments)
            held.append(_sum_by_segment(token_losses, batch, len(segments.doc_ids), dataset.packer == "bucketed"))
            done += int(segments.tokens.sum())
            if len(held) == BATCHES_HELD:
                losses.append(torch.cat(held).cpu().numpy())
                held = []
            if on_progress is not None:
                on_progress(done, total)
    lm.token_losses = None
    if held:
        losses.append(torch.cat(held).cpu().numpy())
    if not found:
        empty = np.zeros(0, np.int64)
        return _Segments(empty, empty, empty, empty, np.zeros(0), np.zeros(0))
    joined = _Segments(*(np.concatenate(column) for column in zip(*found, strict=True)))
    return joined._replace(losses=np.concatenate(losses))


def _segments_of(packs: list[Row]) -> _Segments:
    """Return what the dataset says of the segments of some packs, in their order."""
    columns: list[tuple[np.ndarray, ...]] = []
    for pack in packs:
        starts, mask = pack["cu_seqlens"][:-1], pack["loss_mask"].astype(np.int64)
        targets = np.add.reduceat(mask, starts)
        weights = (
            np.add.reduceat(pack["loss_weights"].astype(np.float64), starts) if "loss_weights" in pack else targets
        )
        tokens = pack.get("segment_lens", np.diff(pack["cu_seqlens"])).astype(np.int64)
        columns.append((pack["doc_ids"], pack["doc_parts"], tokens, targets, weights, np.zeros(0)))
    return _Segments(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _sum_by_segment(token_losses: torch.Tensor, batch: Any, segments: int, rectangular: bool) -> torch.Tensor:
    """Sum token losses over the first segments of a batch; float64 (segments,).

    Slot i holds the loss of the token at i + 1, so that a segment's losses lie in its own slots; losses of
    [1, 2, 0, 3, 0] with boundaries [0, 3, 5] give [3, 3].
    """
    if rectangular:
        return token_losses.view(batch["input_ids"].shape).sum(1, dtype=torch.float64)[:segments]
    sums = torch.zeros(len(token_losses) + 1, dtype=torch.float64, device=token_losses.device)
    torch.cumsum(token_losses, 0, dtype=torch.float64, out=sums[1:])
    ends = batch["cu_seqlens"][: segments + 1].long()
    return sums[ends[1:]] - sums[ends[:-1]]


def _table_of(segments: _Segments, dataset: Dataset, model: str) -> pa.Table:
    """Add up segments by document."""
    order = np.lexsort((segments.doc_parts, segments.doc_ids))
    ids, parts = segments.doc_ids[order], segments.doc_parts[order]
    starts = np.flatnonzero(np.diff(ids, prepend=-1) | np.diff(parts, prepend=-1))
    tokens, targets, weights, losses = (
        np.add.reduceat(column[order], starts)
        for column in (segments.tokens, segments.targets, segments.weights, segments.losses)
    )
    provenance = Provenance(dataset)
    records = [provenance.record_of(document) for document in ids[starts].tolist()]
    columns = {
        "doc_id": ids[starts],
        "doc_part": parts[starts].astype(np.int32),
        "source": [record and record.source for record in records],
        "file": [record and record.file for record in records],
        "record": [record and record.number for record in records],
        "tokens": tokens,
        "targets": targets,
        "weight": weights,
        "loss": pa.array(losses / np.where(weights > 0, weights, 1.0), pa.float32(), mask=weights <= 0),
    }
    arrays = []
    for field in SCHEMA:
        column = columns[field.name]
        plain = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        array = column if isinstance(column, pa.Array) else pa.array(column, plain)
        arrays.append(array.dictionary_encode() if plain is not field.type else array)
    metadata = {"dataset_id": dataset.dataset_id, "corpus_id": corpus_id(dataset.plan), "model": model}
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata(metadata))


class ScoredDocument(DocumentName):
    """One row of the table."""

    tokens: int
    targets: int
    weight: float


class ScoreSummary(TypedDict):
    """What `pack score` says on the terminal."""

    documents: int
    without_targets: int
    targets: int
    loss: float
    "Mean over all targets."
    quantiles: dict[str, float]
    "Of the losses of documents: p1, p5, p25, p50, p75, p95, p99, max."
    worst: list[ScoredDocument]
    "Documents of highest loss."


def summary_of(result: ScoreResult) -> ScoreSummary:
    """Return the figures that a person wants first."""
    losses = result.table["loss"].to_numpy()
    scored = losses[~np.isnan(losses)]
    points = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}
    highest = np.argsort(np.nan_to_num(-losses, nan=np.inf), kind="stable")[: min(WORST_SHOWN, len(scored))]
    return {
        "documents": len(losses),
        "without_targets": len(losses) - len(scored),
        "targets": int(result.table["targets"].to_numpy().sum()),
        "loss": result.loss,
        "quantiles": {name: float(np.quantile(scored, point)) for name, point in points.items()},
        "worst": cast("list[ScoredDocument]", result.table.take(highest).to_pylist()),
    }


def write_table(table: pa.Table, out: str | Path, *, overwrite: bool = False) -> None:
    """Write a file whole or not at all.

    Raises:
        PackError: It cannot be written, or somebody else has written it meanwhile.
    """
    scratch = Path(f"{out}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, scratch, compression="zstd")
        if Path(out).exists() and not overwrite:
            raise PackError(f"`out`: {out} has come meanwhile; expected no file. Choose another, or add `overwrite`.")
        scratch.replace(out)
    except OSError as error:
        raise PackError(f"{out}: cannot be written ({error.strerror or error}). Choose another `out`.") from error
    finally:
        scratch.unlink(missing_ok=True)
