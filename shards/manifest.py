"""Sidecars (the commit of one window) and the manifest (the commit of the dataset).

A sidecar says everything about its window that the manifest needs, its rows of the index included, so committing a
dataset reads sidecars one after another and never opens a shard. Counts form a balance sheet: documents read = packed +
dropped, tokens read = packed + lost, targets read = packed + lost, each with its reasons.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from shards.errors import FormatError
from shards.plan import Plan, plan_id
from shards.publish import Store, canonical, seal, unseal
from shards.schema import FORMAT, INDEX_SCHEMA, VERSION, layout_of
from shards.writer import decode_index, write_stream

Record = dict[str, Any]
LONGEST = 10  # over-long documents named in a report
HISTOGRAMS = ("lengths", "segment_lengths")  # of documents as tokenized, of segments as packed

# exact up to 256 tokens, then 64 classes an octave: within 1.6 % anywhere
LENGTH_EDGES = np.concatenate(
    [np.arange(1, 256)] + [(1 << octave) + np.arange(64) * (1 << (octave - 6)) for octave in range(8, 31)]
).astype(np.int64)


def length_histogram(lengths: np.ndarray) -> list[list[int]]:
    """Count documents or segments by length.

    Args:
        lengths: Tokens of each, int (n,), each >= 1.

    Returns:
        `[lower edge of the class, how many, tokens]` for every class that is not empty, rising.
    """
    classes = np.searchsorted(LENGTH_EDGES, lengths, side="right") - 1
    counts = np.bincount(classes, minlength=len(LENGTH_EDGES))
    tokens = np.bincount(classes, weights=lengths, minlength=len(LENGTH_EDGES))
    return [[int(LENGTH_EDGES[k]), int(counts[k]), int(tokens[k])] for k in np.flatnonzero(counts)]


def empty_counts() -> Record:
    """Return a balance sheet of nothing."""
    return {
        "documents": {"read": 0, "packed": 0, "split": 0, "truncated": 0, "dropped": {}},
        "tokens": {"read": 0, "packed": 0, "lost": {}},
        "targets": {"read": 0, "packed": 0, "lost": {}},
        "segments": 0,
        "packs": 0,
    }


def add_counts(left: Record, right: Record) -> Record:
    """Return the sum of two balance sheets, reason by reason."""
    total = dict(left)
    for key, value in right.items():
        total[key] = add_counts(total.get(key, {}), value) if isinstance(value, dict) else total.get(key, 0) + value
    return total


def imbalance(counts: Record) -> str | None:
    """Return what does not add up in a balance sheet, or None."""
    for thing, losses in (("documents", "dropped"), ("tokens", "lost"), ("targets", "lost")):
        sheet = counts[thing]
        lost = sum(sheet[losses].values())
        if sheet["read"] != sheet["packed"] + lost:
            return f"{thing} read {sheet['read']:,} is not packed {sheet['packed']:,} + {losses} {lost:,}"
    return None


def sidecar_name(window: int) -> str:
    """Return the sidecar's place in the dataset."""
    return f"shards/{window:08d}.json"


def read_sidecar(store: Store, window: int) -> Record | None:
    """Return a window's sidecar, or None where the window is not committed.

    Raises:
        FormatError: The sidecar is damaged.
    """
    name = sidecar_name(window)
    data = store.get(name)
    return None if data is None else unseal(data, f"{store.location}/{name}", "F5")


def dataset_id(plan_identity: str, shards: Iterable[Record]) -> str:
    """Return the identity of a dataset: sha256 over its plan and its shards' contents."""
    lines = [[shard["file"], shard["xxh3_128"], shard["rows"], shard["tokens"]] for shard in shards]
    return hashlib.sha256(canonical([plan_identity, lines])).hexdigest()


def digest_files(files: dict[str, bytes]) -> dict[str, str]:
    """Return the xxh3_128 of each file, by name."""
    return {name: xxhash.xxh3_128_hexdigest(data) for name, data in sorted(files.items())}


def commit(
    store: Store, plan: Plan, sidecars: Iterable[Record], tokenizer_files: dict[str, bytes], facts: Record
) -> Record:
    """Write `index.arrow`, the files that `datasets` reads, and last the manifest.

    Args:
        store: The dataset.
        plan: Its plan.
        sidecars: Every window's sidecar, in window order; read once, so memory stays flat.
        tokenizer_files: Content of the files in `tokenizer/`, by name.
        facts: What does not determine bytes: workers, engines, versions, times.

    Returns:
        The manifest.
    """
    identity = plan_id(plan)
    shards: list[Record] = []
    sources: dict[str, Record] = {source["name"]: _new_source(source["name"]) for source in plan["sources"]}
    rejected: list[bytes] = []

    stages: Record = facts.get("stages_s", {})
    engines: dict[bytes, Record] = {}

    def index_batches() -> Iterator[pa.RecordBatch]:
        nonlocal stages
        for sidecar in sidecars:
            shards.append(sidecar["shard"] | {"window": sidecar["window"], "source": sidecar["source"]})
            _add_window(sources[sidecar["source"]], sidecar)
            stages = add_counts(stages, sidecar["facts"]["stages_s"])
            engine = sidecar["facts"]["tokenizer"]
            engines[canonical([engine["engine"], engine["version"], engine["guard"]["result"]])] = engine
            rejected.extend(canonical(entry) + b"\n" for entry in sidecar["rejected"])
            yield from decode_index(sidecar["index"]).to_batches()

    _, index = write_stream(store, "index.arrow", INDEX_SCHEMA, index_batches())
    totals = empty_counts()
    for source in sources.values():
        for name in HISTOGRAMS:
            source[name] = [[edge, *counts] for edge, counts in sorted(source[name].items())]
        totals = add_counts(totals, source["counts"])
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dataset_id": dataset_id(identity, shards),
        "plan_id": identity,
        "seq_len": plan["seq_len"],
        "packer": plan["packer"]["name"],
        "tokenizer": plan["tokenizer"],
        "tokenizer_files": digest_files(tokenizer_files),
        "totals": totals,
        "sources": list(sources.values()),
        "shards": shards,
        "index": index,
        "facts": facts | {"stages_s": stages, "tokenizer": list(engines.values())},
    }
    if wrong := imbalance(totals):
        raise FormatError(
            f"{store.location}: {wrong} (rule F14). This is a fault of shardpack: please report it.", "F14"
        )
    if rejected:
        store.put("rejected.jsonl", b"".join(rejected))
    for name, content in datasets_files(plan, manifest).items():
        store.put(name, canonical(content))
    store.put("manifest.json", seal(manifest), if_absent=True)
    return manifest


def _new_source(name: str) -> Record:
    empty: Record = {histogram: {} for histogram in HISTOGRAMS}
    return {"name": name, "counts": empty_counts(), "longest": [], "bound_packs": 0} | empty


def _add_window(source: Record, sidecar: Record) -> None:
    source["counts"] = add_counts(source["counts"], sidecar["counts"])
    source["bound_packs"] += sidecar["bound_packs"]
    for name in HISTOGRAMS:
        for edge, number, tokens in sidecar[name]:
            old = source[name].get(edge, (0, 0))
            source[name][edge] = (old[0] + number, old[1] + tokens)
    source["longest"] = sorted(
        source["longest"] + sidecar["longest"], key=lambda entry: (-entry["tokens"], entry["doc_id"])
    )[:LONGEST]


def datasets_files(plan: Plan, manifest: Record) -> dict[str, Record]:
    """Return `state.json` and `dataset_info.json`, with which `datasets.load_from_disk` maps the shards as they are."""
    features = {}
    for field in layout_of(plan).schema():
        value = field.type.value_type if pa.types.is_list(field.type) else field.type
        feature: Record = {"dtype": str(value), "_type": "Value"}
        features[field.name] = {"feature": feature, "_type": "List"} if pa.types.is_list(field.type) else feature
    state = {
        "_data_files": [{"filename": shard["file"]} for shard in manifest["shards"]],
        "_fingerprint": manifest["dataset_id"][:16],
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
