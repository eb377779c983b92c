"""The metadata of a dataset: manifest, plan, shard list and index, read and checked."""

import json
from pathlib import Path
from typing import Any, cast

from shards.counts import Histogram
from shards.errors import FormatError
from shards.manifest import INDEX_FILE, Manifest
from shards.plan import Plan, check_version, parse_plan, plan_id, size_problem, stored_columns
from shards.publish import Store, unseal
from shards.records import mismatch, uneven
from shards.schema import Layout
from shards.tables.index import Index
from shards.tables.mapped import RESTORE, map_table, view_table
from shards.tables.shard_list import SHARDS_FILE, SHARDS_SCHEMA, ShardList

MAX_LENGTH = 1 << 31  # of a document, in tokens: offsets in it are int32


def read_manifest(path: Path) -> Manifest:
    """Read and check `manifest.json`.

    Raises:
        FormatError: There is none, it was changed, or another version wrote it.
    """
    file = path / "manifest.json"
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.exists():
            fault = "no such directory; expected a dataset (rule F1). Name a directory that pack build wrote."
            raise FormatError(f"{path}: {fault}", "F1") from error
        unfinished = (path / "plan.json").exists()
        state = "holds an unfinished build" if unfinished else "is not a shardpack dataset"
        advice = "Finish it with pack build … --resume." if unfinished else "Name a directory that pack build wrote."
        raise FormatError(f"{path}: {state}; expected manifest.json (rule F1). {advice}", "F1") from error
    return parse_manifest(data, str(file))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse a `manifest.json` and check its seal, version and fields.

    Raises:
        FormatError: It was changed, or another version wrote it.
    """
    try:
        check_version(json.loads(data), where)
    except (ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where}: is not JSON (rule F1). {RESTORE}", "F1") from error
    manifest = unseal(data, where, "F1")
    if wrong := _problem(manifest):
        raise FormatError(f"{where}: {wrong} (rule F1). {RESTORE}", "F1")
    return cast("Manifest", manifest)


def _problem(manifest: Any) -> str | None:
    """Return what is wrong with the fields of a parsed manifest, or None."""
    if wrong := mismatch(manifest, Manifest):
        return wrong
    if not (manifest["shards"]["rows"] >= 0 and manifest["index"]["rows"] >= 0):
        return "it counts rows below 0"
    found = (
        _histogram_problem(source[name], f"{name} of source {source['name']!r}", longest)
        for source in manifest["sources"]
        for name, longest in (("lengths", MAX_LENGTH), ("segment_lengths", manifest["seq_len"]))
    )
    sizes = size_problem(manifest["seq_len"], manifest["stored"]["align"], manifest["tokenizer"])
    return sizes or next(filter(None, found), None)


def _histogram_problem(histogram: Histogram, where: str, longest: int) -> str | None:
    """Return which class of a histogram no lengths from 1 to `longest` can give, or None."""
    if wrong := uneven(histogram, 3, where):
        return wrong
    for place, (edge, number, tokens) in enumerate(histogram):
        if not (1 <= edge <= longest and number and edge * number <= tokens):
            return f"{where}[{place}] counts {number} lengths from {edge} on, of {tokens} tokens in all"
    return None


def read_plan(path: Path, manifest: Manifest) -> Plan:
    """Read the plan of a dataset, and check that it is the one that the manifest commits.

    Raises:
        FormatError: It is missing, damaged, or another one.
    """
    file = path / "plan.json"
    try:
        plan = parse_plan(file.read_bytes(), str(file))
    except FileNotFoundError as error:
        raise FormatError(f"{file}: is missing (rule F2). Restore it, or build again.", "F2") from error
    if plan_id(plan) != manifest["plan_id"]:
        raise FormatError(
            f"{file}: is not the plan that the manifest names (rule F2). Restore it, or build again.", "F2"
        )
    names = [source["name"] for source in manifest["sources"]]
    told = (manifest["seq_len"], manifest["packer"], manifest["tokenizer"], manifest["stored"], names)
    planned = [source["name"] for source in plan["sources"]]
    if told != (plan["seq_len"], plan["packer"]["name"], plan["tokenizer"], stored_columns(plan), planned):
        raise FormatError(
            f"{path / 'manifest.json'}: names seq_len {manifest['seq_len']}, packer {manifest['packer']!r}, columns, a "
            f"tokenizer or sources that are not the plan's (rule F1). {RESTORE}",
            "F1",
        )
    return plan


def read_shard_list(path: Path, manifest: Manifest) -> ShardList:
    """Map the shard list of a dataset.

    Raises:
        FormatError: It is missing or damaged.
    """
    file = path / SHARDS_FILE
    columns = map_table(file, SHARDS_SCHEMA, manifest["shards"], "F17")
    return ShardList(columns, [source["name"] for source in manifest["sources"]], str(file))


def list_shards(store: Store, manifest: Manifest) -> ShardList:
    """Read the shard list of a dataset that lies in a store.

    Raises:
        FormatError: It is missing or damaged.
    """
    where = f"{store.location}/{SHARDS_FILE}"
    columns = view_table(store.get(SHARDS_FILE) or b"", where, SHARDS_SCHEMA, manifest["shards"], "F17")
    return ShardList(columns, [source["name"] for source in manifest["sources"]], where)


def read_index(path: Path, manifest: Manifest, layout: Layout) -> Index:
    """Map the index of a dataset.

    Raises:
        FormatError: It is missing or damaged.
    """
    return Index(**map_table(path / INDEX_FILE, layout.index_schema(), manifest["index"], "F13"))
