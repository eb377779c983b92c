"""The manifest: the commit of a dataset.

Committing reads the sidecars one after another and never opens a shard; memory stays flat whatever their number, and
the manifest itself does not grow with it, since shard list and index are tables beside it.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import pyarrow as pa
import xxhash

from shards.counts import Counts, Histogram, HistogramSum, add_counts, add_numbers, empty_counts, imbalance
from shards.errors import FormatError
from shards.plan import FORMAT, VERSION, Plan, Stored, TokenizerPlan, plan_id, stored_columns
from shards.publish import Store, canonical, seal
from shards.schema import layout_of
from shards.sidecar import (
    MAX_LONGEST,
    EngineFact,
    LongDocument,
    ShardRecord,
    Sidecar,
    SpelledFact,
    UnrolledFact,
    decode_index,
    sidecar_name,
)
from shards.tables.mapped import TableEntry, write_table
from shards.tables.shard_list import SHARDS_FILE, SHARDS_SCHEMA, dataset_id, list_columns

INDEX_FILE = "index.arrow"
LISTED_AT_ONCE = 4096  # shards whose entries are written together


class SourceTotals(TypedDict):
    """What a manifest says of one source."""

    name: str
    counts: Counts
    lengths: Histogram
    segment_lengths: Histogram
    bound_packs: int
    longest: list[LongDocument]


class Maxima(TypedDict):
    """The largest values of columns of the index, known without reading it; 0 where there is no pack."""

    max_seqlen: int
    num_segments: int


class Facts(TypedDict):
    """What a build says of itself that determines no byte; of this, what somebody reads."""

    tokenizer: NotRequired[list[EngineFact]]
    seconds: NotRequired[float]
    tokens_read: NotRequired[int]
    workers: NotRequired[int]
    trained_end_ids: NotRequired[list[int]]
    unrolled: NotRequired[UnrolledFact]
    spelled_controls: NotRequired[SpelledFact]
    unread_fields: NotRequired[dict[str, dict[str, int]]]
    tokenizer_proofs: NotRequired[list[dict[str, Any]]]


class Manifest(TypedDict):
    """The commit of a dataset."""

    format: str
    version: int
    dataset_id: str
    plan_id: str
    seq_len: int
    packer: str
    stored: Stored
    tokenizer: TokenizerPlan
    tokenizer_files: dict[str, str]
    totals: Counts
    sources: list[SourceTotals]
    maxima: Maxima
    shards: TableEntry
    index: TableEntry
    facts: Facts


def digest_files(files: dict[str, bytes]) -> dict[str, str]:
    """Return the xxh3_128 of each file, by name."""
    return {name: xxhash.xxh3_128_hexdigest(data) for name, data in sorted(files.items())}


def _values(column: pa.ChunkedArray) -> np.ndarray:
    """Return the numbers of a column without nulls; the conversion of pyarrow imports pandas."""
    parts = [
        np.frombuffer(chunk.buffers()[1], chunk.type.to_pandas_dtype())[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, column.type.to_pandas_dtype())


def commit(
    store: Store, plan: Plan, sidecars: Iterable[Sidecar], tokenizer_files: dict[str, bytes], facts: dict[str, Any]
) -> Manifest:
    """Write the shard list, the index, the files that `datasets` reads, and last the manifest.

    Args:
        store: The dataset.
        plan: Its plan.
        sidecars: Every window's sidecar, in window order; read once, so memory stays flat.
        tokenizer_files: Content of the files in `tokenizer/`, by name.
        facts: What does not determine bytes: workers, engines, versions, times.

    Returns:
        The manifest.

    Raises:
        FormatError: A sidecar is damaged, or the counts do not add up.
        PackError: Another build has committed meanwhile.
    """
    identity, layout = plan_id(plan), layout_of(plan)
    gathered = _Gathered(plan, facts.get("stages_s", {}))

    def index_parts() -> Iterator[dict[str, np.ndarray]]:
        for sidecar in sidecars:
            table = decode_index(sidecar, layout.index_schema(), f"{store.location}/{sidecar_name(sidecar['window'])}")
            columns = {name: _values(table.column(name)) for name in table.schema.names}
            gathered.add(sidecar, columns)
            yield columns

    index = write_table(store, INDEX_FILE, layout.index_schema(), index_parts())
    shards = write_table(store, SHARDS_FILE, SHARDS_SCHEMA, gathered.listed())
    sources = gathered.sums.figures()
    totals = reduce(add_counts, (source["counts"] for source in sources), empty_counts())
    manifest: Manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dataset_id": dataset_id(identity, gathered.listed()),
        "plan_id": identity,
        "seq_len": plan["seq_len"],
        "packer": plan["packer"]["name"],
        "stored": stored_columns(plan),
        "tokenizer": plan["tokenizer"],
        "tokenizer_files": digest_files(tokenizer_files),
        "totals": totals,
        "sources": sources,
        "maxima": gathered.maxima,
        "shards": shards,
        "index": index,
        "facts": cast("Facts", facts | {"stages_s": gathered.stages, "tokenizer": list(gathered.engines.values())}),
    }
    if wrong := imbalance(totals):
        raise FormatError(
            f"{store.location}: {wrong} (rule F14). This is a fault of shardpack: please report it.", "F14"
        )
    if gathered.rejected:
        store.put("rejected.jsonl", b"".join(gathered.rejected))
    files = [shard["file"] for shard in gathered.shards]
    for name, content in datasets_files(plan, manifest["dataset_id"], files).items():
        store.put(name, canonical(content))
    store.put("manifest.json", seal(manifest), if_absent=True)
    return manifest


class SourceSums:
    """Sums of sidecars, by source.

    Args:
        names: The sources of the plan, in order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._figures: dict[str, SourceTotals] = {
            name: {
                "name": name, "counts": empty_counts(), "lengths": [], "segment_lengths": [], "bound_packs": 0,
                "longest": [],
            }
            for name in names
        }  # fmt: skip
        self._histograms = {(name, key): HistogramSum() for name in names for key in ("lengths", "segment_lengths")}

    def add(self, sidecar: Sidecar) -> None:
        """Add a window."""
        name = sidecar["source"]
        source = self._figures[name]
        source["counts"] = add_counts(source["counts"], sidecar["counts"])
        source["bound_packs"] += sidecar["bound_packs"]
        self._histograms[name, "lengths"].add(sidecar["lengths"])
        self._histograms[name, "segment_lengths"].add(sidecar["segment_lengths"])
        longest = sorted([*source["longest"], *sidecar["longest"]], key=lambda each: (-each["tokens"], each["doc_id"]))
        source["longest"] = longest[:MAX_LONGEST]

    def figures(self) -> list[SourceTotals]:
        """Return what a manifest says of each source."""
        for name, source in self._figures.items():
            source["lengths"] = self._histograms[name, "lengths"].total()
            source["segment_lengths"] = self._histograms[name, "segment_lengths"].total()
        return list(self._figures.values())


class _Gathered:
    """What the sidecars of a dataset say together."""

    def __init__(self, plan: Plan, stages: dict[str, Any]) -> None:
        names = [source["name"] for source in plan["sources"]]
        self.sums = SourceSums(names)
        self._numbers = {name: number for number, name in enumerate(names)}
        self.shards: list[ShardRecord] = []
        self._source_of: list[int] = []
        self.maxima: Maxima = {"max_seqlen": 0, "num_segments": 0}
        self.rejected: list[bytes] = []
        self.stages = stages
        self.engines: dict[bytes, Any] = {}

    def add(self, sidecar: Sidecar, index: dict[str, np.ndarray]) -> None:
        """Add a window: its sidecar, and the sidecar's rows of the index."""
        self.shards.append(sidecar["shard"])
        self._source_of.append(self._numbers[sidecar["source"]])
        self.sums.add(sidecar)
        self.stages = add_numbers(self.stages, sidecar["facts"]["stages_s"])
        if engine := sidecar["facts"].get("tokenizer"):
            self.engines[canonical([engine["engine"], engine["version"], engine["guard"]["result"]])] = engine
        self.rejected.extend(canonical(entry) + b"\n" for entry in sidecar["rejected"])
        self.maxima = {
            "max_seqlen": int(index["max_seqlen"].max(initial=self.maxima["max_seqlen"])),
            "num_segments": int(index["num_segments"].max(initial=self.maxima["num_segments"])),
        }

    def listed(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the shard list in parts."""
        first_pack = 0
        for start in range(0, len(self.shards), LISTED_AT_ONCE):
            stop = start + LISTED_AT_ONCE
            part = list_columns(self.shards[start:stop], self._source_of[start:stop], first_pack)
            first_pack += int(part["packs"].sum())
            yield part


def datasets_files(plan: Plan, dataset_id: str, files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return `state.json` and `dataset_info.json`, with which `datasets.load_from_disk` maps the shards as they are.

    Args:
        plan: The plan.
        dataset_id: Identity of the dataset.
        files: The shard files, in window order.
    """
    features = {}
    for field in layout_of(plan).schema():
        value = field.type.value_type if pa.types.is_list(field.type) else field.type
        named = "float16" if pa.types.is_float16(value) else str(value)  # Arrow's own name is no name to datasets
        feature: dict[str, Any] = {"dtype": named, "_type": "Value"}
        features[field.name] = {"feature": feature, "_type": "List"} if pa.types.is_list(field.type) else feature
    state: dict[str, Any] = {
        "_data_files": [{"filename": file} for file in files],
        "_fingerprint": dataset_id[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    return {
        "state.json": state,
        "dataset_info.json": {"citation": "", "description": "", "features": features, "homepage": "", "license": ""},
    }
