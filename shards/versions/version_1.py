"""Datasets of format version 1, as rows of version 2: what `pack repack` upgrades.

Version 1 listed its shards in the manifest, had no parts, and did not remember the targets that a cut made first tokens
of segments: of plain text they are known, of anything else they are lost (`targets_lost` counts them).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from shards.counts import Counts
from shards.errors import FormatError
from shards.manifest import Facts
from shards.plan import FORMAT, VERSION, Plan, plan_id, plan_problem
from shards.publish import hash_file, unseal
from shards.records import mismatch
from shards.rows import check_rows
from shards.schema import layout_of
from shards.shard import ArrowBatch, Shard
from shards.sidecar import shard_name
from shards.tables.mapped import RESTORE


class OldShard(TypedDict):
    """What the manifest of version 1 says of a shard."""

    bytes: int
    xxh3_128: str
    window: int
    source: str


class OldSource(TypedDict):
    """What it says of a source."""

    name: str
    counts: Counts


class OldManifest(TypedDict):
    """What an upgrade reads of the manifest of version 1."""

    plan_id: str
    dataset_id: str
    sources: list[OldSource]
    shards: list[OldShard]
    facts: Facts


def is_version_1(path: str | Path) -> bool:
    """Whether a directory holds a dataset of format version 1."""
    try:
        manifest = json.loads((Path(path) / "manifest.json").read_bytes())
        return (manifest.get("format"), manifest.get("version")) == (FORMAT, 1)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


class Version1:
    """A dataset of format version 1.

    Args:
        path: The dataset directory.

    Raises:
        FormatError: It is none, or is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        manifest = unseal(self._read("manifest.json"), f"{path}/manifest.json", "F1")
        found = (manifest.get("format"), manifest.get("version"))
        if found != (FORMAT, 1):
            raise FormatError(f"{path}: found format {found[0]!r} version {found[1]!r}; expected version 1.", "F1")
        if wrong := mismatch(manifest, OldManifest) or self._order_problem(manifest["shards"]):
            raise FormatError(f"{path}/manifest.json: {wrong} (rule F1). {RESTORE}", "F1")
        self.manifest = cast("OldManifest", manifest)
        "The manifest, as it is."
        self.plan = self._upgraded_plan()
        "The plan, with the fields of version 2."

    def _order_problem(self, shards: list[OldShard]) -> str | None:
        windows = [record["window"] for record in shards]
        return None if windows == [*range(len(windows))] else "does not list its windows in their order"

    def _upgraded_plan(self) -> Plan:
        where = f"{self.path}/plan.json"
        try:
            data = json.loads(self._read("plan.json"))
            identity = plan_id(data)
            upgraded = {**data, "version": VERSION, "turn_ends": False, "align": 1, "loss_weights": False}
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"{where}: is not JSON (rule F2). {RESTORE}", "F2") from error
        if identity != self.manifest["plan_id"]:
            raise FormatError(f"{where}: is not the plan that the manifest names (rule F2). {RESTORE}", "F2")
        if wrong := plan_problem(upgraded | {"loss_mask": True}):
            raise FormatError(f"{where}: {wrong} (rule F2). {RESTORE}", "F2")
        kinds = {source["name"]: source["records"].get("kind", "text") for source in upgraded["sources"]}
        self._texts = {name for name, kind in kinds.items() if kind == "text"}
        return cast("Plan", upgraded | {"loss_mask": len(self._texts) < len(kinds)})

    @property
    def targets_lost(self) -> int:
        """Targets that cuts hid and that are not known any more, over sources that are not plain text."""
        others = (source for source in self.manifest["sources"] if source["name"] not in self._texts)
        return sum(source["counts"]["targets"]["lost"].get("boundary", 0) for source in others)

    def is_text(self, source: str) -> bool:
        """Whether a source is plain text: every token but a document's first is a target."""
        return source in self._texts

    def batches(self, window: int) -> Iterator[ArrowBatch]:
        """Yield the record batches of a window with the columns of version 2, hashed and checked.

        Raises:
            FormatError: Its shard is damaged.
        """
        layout = layout_of(self.plan)
        stored = replace(layout, loss_mask=True, padded=False)
        record = self.manifest["shards"][window]
        shard = Shard(self.path / shard_name(window, record["xxh3_128"]), record["bytes"])
        if hash_file(shard.path) != record["xxh3_128"]:
            raise FormatError(f"{shard.path}: does not match its checksum (rule F4). {RESTORE}", "F4")
        for number in range(shard.num_batches):
            batch = self._upgraded(shard.batch(number), record["source"])
            for problem in check_rows(batch, stored, window, layout.max_token_id + 1):
                row = shard.starts[number] + problem.row
                raise FormatError(f"{shard.path}, row {row}: {problem.what}. {RESTORE}", problem.rule)
            yield batch

    def _upgraded(self, batch: ArrowBatch, source: str) -> ArrowBatch:
        """Add the columns of version 2 to a batch."""
        doc_offsets, bounds = batch.lists["doc_offsets"]
        known = source in self._texts
        hidden = np.where(known, doc_offsets > 0, False).astype(np.uint8)
        new: dict[str, tuple[np.ndarray, np.ndarray]] = {
            "doc_parts": (np.zeros(len(doc_offsets), np.int32), bounds),
            "start_targets": (hidden, bounds),
        }
        kept = {name: values for name, values in batch.rows.items() if name != "bucket"}
        return ArrowBatch(batch.num_rows, batch.lists | new, kept)

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FormatError(f"{self.path}: has no {name}; expected a dataset of format version 1.", "F1") from error
