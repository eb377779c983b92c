"""Datasets of format version 1, as rows of version 2: what `pack repack` upgrades.

Version 1 listed its shards in the manifest, had no parts, and did not remember the targets that a cut made first tokens
of segments: of plain text they are known, of anything else they are lost (`targets_lost` counts them).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from shards.errors import FormatError
from shards.plan import FORMAT, VERSION, Plan, plan_id, plan_problem
from shards.publish import hash_file, unseal
from shards.rows import check_rows
from shards.schema import layout_of
from shards.shard import ArrowBatch, Shard
from shards.tables.mapped import RESTORE


class OldBatch(NamedTuple):
    """A record batch of an old shard."""

    window: int
    source: str
    batch: ArrowBatch
    "With the columns of version 2."


class Version1:
    """A dataset of format version 1.

    Args:
        path: The dataset directory.

    Raises:
        FormatError: It is none, or is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: dict[str, Any] = unseal(self._read("manifest.json"), f"{path}/manifest.json", "F1")
        found = (self.manifest.get("format"), self.manifest.get("version"))
        if found != (FORMAT, 1):
            raise FormatError(f"{path}: found format {found[0]!r} version {found[1]!r}; expected version 1.", "F1")
        data = json.loads(self._read("plan.json"))
        if plan_id(data) != self.manifest["plan_id"]:
            raise FormatError(f"{path}/plan.json: is not the plan that the manifest names (rule F2). {RESTORE}", "F2")
        kinds = {source["name"]: source["records"].get("kind", "text") for source in data["sources"]}
        self._texts = {name for name, kind in kinds.items() if kind == "text"}
        new = {"version": VERSION, "loss_mask": len(self._texts) < len(kinds), "loss_weights": False}
        upgraded = data | new | {"turn_ends": False, "align": 1}
        if wrong := plan_problem(upgraded):
            raise FormatError(f"{path}/plan.json: {wrong} (rule F2). {RESTORE}", "F2")
        self.plan = cast("Plan", upgraded)
        "The plan, with the fields of version 2."

    @property
    def targets_lost(self) -> int:
        """Targets that cuts hid and that are not known any more, over sources that are not plain text."""
        others = (source for source in self.manifest["sources"] if source["name"] not in self._texts)
        return sum(source["counts"]["targets"]["lost"].get("boundary", 0) for source in others)

    def batches(self) -> Iterator[OldBatch]:
        """Yield the rows of the dataset in window order, hashed and checked.

        Raises:
            FormatError: A shard is damaged.
        """
        layout = layout_of(self.plan)
        stored = replace(layout, loss_mask=True, padded=False)
        for record in self.manifest["shards"]:
            shard = Shard(self.path / record["file"], record["bytes"])
            if hash_file(shard.path) != record["xxh3_128"]:
                raise FormatError(f"{shard.path}: does not match its checksum (rule F4). {RESTORE}", "F4")
            for number in range(shard.num_batches):
                batch = self._upgraded(shard.batch(number), record["source"])
                for problem in check_rows(batch, stored, record["window"], layout.max_token_id + 1):
                    row = shard.starts[number] + problem.row
                    raise FormatError(f"{shard.path}, row {row}: {problem.what}. {RESTORE}", problem.rule)
                yield OldBatch(record["window"], record["source"], batch)

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
