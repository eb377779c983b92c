"""A dataset of format version 1 written as version 2: the same packs in the same windows, with the columns of today."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from pipeline.building.driver import BuildResult
from pipeline.building.progress import Progress
from pipeline.building.repacking.rewriting import WriteWindow, facts_of, output_of, rewrite
from pipeline.config import RecordOptions, RepackConfig
from shards.counts import Counts
from shards.errors import PackError, counted
from shards.plan import VERSION, Plan, plan_id
from shards.publish import LocalStore, Store, seal, unseal
from shards.schema import Layout, layout_of
from shards.shard import ArrowBatch
from shards.sidecar import encode_index, parse_sidecar, sidecar_name
from shards.versions.version_1 import Version1
from shards.writer import PackedRows, write_shard

FORGOTTEN = "boundary-of-version-1"
"Why targets are lost that a cut hid, and that no repacking brings back: version 1 did not note them."


def upgrade(config: RepackConfig, progress: Progress) -> BuildResult:
    """Write a dataset of version 1 as one of version 2, pack by pack.

    Args:
        config: Which dataset, and where to.
        progress: Where to report.

    Raises:
        PackError: The dataset is damaged, or other settings than these are given.
    """
    given = [
        field.name
        for field in fields(config)
        if field.name not in ("dataset", "out", "resume", "overwrite") and getattr(config, field.name) != field.default
    ]
    if given:
        raise PackError(
            f"{config.dataset}: is of format version 1, which is upgraded as it is; expected no `{given[0]}`. Upgrade "
            "it first, then repack the result."
        )
    old = Version1(config.dataset)
    if old.targets_lost:
        progress.on_message(
            f"{config.dataset}: cuts hid {counted(old.targets_lost, 'target')} of conversations, prompts or imported "
            f"ids, which version 1 did not note: repacking will not bring them back (counted as {FORGOTTEN})"
        )
    output = output_of(_plan_of(old), str(config.out), old.path)
    origin = {"version": 1, "dataset_id": old.manifest["dataset_id"]}
    facts = facts_of(old.manifest["facts"]) | {"upgraded_from": origin}

    def begin(store: Store) -> WriteWindow:
        return _Upgrade(old, output.plan, store).write_window

    return rewrite(output, config, len(old.manifest["shards"]), begin, facts, progress)


def _plan_of(old: Version1) -> Plan:
    """Return the plan of the upgraded dataset: options that came later have the values that they stand for."""
    sources = old.plan["sources"]
    try:
        return {
            **old.plan,
            "sources": [{**source, "records": RecordOptions(**source["records"]).as_plan()} for source in sources],
        }
    except TypeError as error:
        raise PackError(
            f"{old.path}/plan.json: has options of another version ({error}). Build again from the corpus."
        ) from error


class _Upgrade:
    """Writes the windows of an old dataset.

    Args:
        old: The dataset.
        plan: Of the new one.
        store: Where it goes.
    """

    def __init__(self, old: Version1, plan: Plan, store: Store) -> None:
        self.old, self.plan, self.store = old, plan, store
        self.layout: Layout = layout_of(plan)

    def write_window(self, number: int) -> Counts:
        """Write a window's shard and sidecar."""
        rows = rows_of(list(self.old.batches(number)), self.layout)
        shard = write_shard(self.store, self.layout, plan_id(self.plan), number, rows)
        name = sidecar_name(number)
        where = f"{self.old.path}/{name}"
        before = unseal(LocalStore(self.old.path).get(name) or b"", where, "F5")
        new: dict[str, Any] = {
            "version": VERSION,
            "plan_id": plan_id(self.plan),
            "shard": shard,
            "index": encode_index(rows.index(self.layout)),
        }
        data = seal(before | new)
        sidecar = parse_sidecar(data, where)
        lost = sidecar["counts"]["targets"]["lost"]
        if "boundary" in lost and not self.old.is_text(sidecar["source"]):
            lost[FORGOTTEN] = lost.pop("boundary")
            data = seal(sidecar)
        self.store.put(name, data)
        return sidecar["counts"]


def rows_of(batches: Sequence[ArrowBatch], layout: Layout) -> PackedRows:
    """Return the rows of a window's batches, flat.

    Args:
        batches: With the columns of version 2; none of a window without packs.
        layout: What is stored of them.
    """

    def values(name: str, dtype: Any) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *(batch.lists[name][0] for batch in batches)])

    def figures(name: str, dtype: Any) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *(batch.rows[name] for batch in batches)])

    tokens, segments = (_offsets([batch.lists[name][1] for batch in batches]) for name in ("input_ids", "doc_ids"))
    cu_seqlens, loss_mask = values("cu_seqlens", np.int32), values("loss_mask", np.uint8)
    row_ends = segments[1:] + np.arange(len(segments) - 1)  # in cu_seqlens, which has one more entry for each row
    starts = np.delete(cu_seqlens, row_ends) + np.repeat(tokens[:-1], np.diff(segments))
    trained = np.add.reduceat(loss_mask, starts, dtype=np.int64) > 0 if len(starts) else np.zeros(0, bool)
    trained_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(trained)])
    return PackedRows(
        token_offsets=tokens,
        segment_offsets=segments,
        input_ids=values("input_ids", layout.token_type.to_pandas_dtype()),
        position_ids=values("position_ids", layout.position_type.to_pandas_dtype()) if layout.position_ids else None,
        loss_mask=loss_mask if layout.loss_mask else None,
        cu_seqlens=cu_seqlens,
        doc_ids=values("doc_ids", np.int64),
        doc_parts=values("doc_parts", np.int32),
        doc_offsets=values("doc_offsets", np.int32),
        start_targets=values("start_targets", np.uint8),
        num_tokens=np.diff(tokens).astype(np.int32),
        max_seqlen=figures("max_seqlen", np.int32),
        num_targets=figures("num_targets", np.int32),
        num_target_segments=np.diff(trained_before[segments]).astype(np.int32),
        attention_pairs=figures("attention_pairs", np.int64),
    )


def _offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return row offsets of parts one after another; int64 (num_rows + 1,)."""
    lengths = [np.diff(part) for part in parts]
    return np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int64)
