"""What a dataset will hold, decided before the first byte: `plan.json`.

A plan has only what determines bytes: sources (names, sizes, fingerprints), tokenizer digest, options, packer, windows.
Workers, engines, paths and times are not in it, so they cannot change the result. `plan_id` is the sha256 of its
canonical JSON; every sidecar and shard names it, so work of another plan is never mistaken for this one's.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NotRequired, TypedDict, cast

from shards.errors import FormatError, counted
from shards.publish import canonical
from shards.records import mismatch

FORMAT = "shardpack"
VERSION = 2
MAX_SEQ_LEN = 1 << 24  # packing counts lengths in tables of this size
SOURCE_NAME = r"[A-Za-z0-9_.-]+"


class Stored(TypedDict):
    """Which columns shards have."""

    position_ids: bool
    loss_mask: bool
    loss_weights: bool
    turn_ends: bool
    align: int


class PackerPlan(TypedDict):
    """How segments are packed."""

    name: str
    max_segments: int | None


class TokenizerPlan(TypedDict):
    """What identifies a tokenizer."""

    digest: str
    vocab_size: int
    max_id: int
    bos_id: NotRequired[int | None]
    eos_id: NotRequired[int | None]
    pad_id: NotRequired[int | None]
    prefix_ids: NotRequired[list[int]]
    suffix_ids: NotRequired[list[int]]


class FilePlan(TypedDict):
    """What identifies a file of a source."""

    name: str
    bytes: int | None
    format: str
    compression: str | None
    fingerprint: str


class SourcePlan(TypedDict):
    """One source."""

    name: str
    records: dict[str, Any]
    files: list[FilePlan]


class Plan(Stored):
    """What determines the bytes of a dataset."""

    format: str
    version: int
    recipe: int
    seq_len: int
    seed: int
    packer: PackerPlan
    tokenizer: TokenizerPlan
    sources: list[SourcePlan]
    windows: list[Any]
    "[source, [[file, start, stop], ...]] of each window"
    part_bytes: int
    select: NotRequired[list[dict[str, Any]]]
    "What was set aside of the corpus' documents, step by step."


def make_plan(
    *,
    seq_len: int,
    tokenizer: TokenizerPlan,
    sources: Sequence[SourcePlan],
    windows: Sequence[Any] = (),
    part_bytes: int = 0,
    packer: str = "auto",
    max_segments: int | None = None,
    seed: int = 0,
    position_ids: bool = True,
    loss_mask: bool = True,
    loss_weights: bool = False,
    turn_ends: bool = False,
    align: int = 1,
    recipe: int = 1,
) -> Plan:
    """Return a plan; see `docs/format.md` for what the fields mean."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "recipe": recipe,
        "seq_len": seq_len,
        "seed": seed,
        "position_ids": position_ids,
        "loss_mask": loss_mask,
        "loss_weights": loss_weights,
        "turn_ends": turn_ends,
        "align": align,
        "packer": {"name": packer, "max_segments": max_segments},
        "tokenizer": tokenizer,
        "sources": list(sources),
        "windows": list(windows),
        "part_bytes": part_bytes,
    }


def make_source(name: str, records: dict[str, Any] | None = None, files: Sequence[FilePlan] = ()) -> SourcePlan:
    """Return one source of a plan."""
    return {"name": name, "records": records or {}, "files": list(files)}


def plan_id(plan: Plan) -> str:
    """Return the plan's identity: 64 hexadecimal digits."""
    return hashlib.sha256(canonical(plan)).hexdigest()


def corpus_id(plan: Plan) -> str:
    """Return the identity of what a plan's documents are counted in: files and windows, however they are packed.

    A `doc_id` means the same record in every dataset of one corpus id.
    """
    sources = [{"name": source["name"], "files": source["files"]} for source in plan["sources"]]
    content = {"sources": sources, "windows": plan["windows"], "part_bytes": plan["part_bytes"]}
    return hashlib.sha256(canonical(content)).hexdigest()


def check_version(record: Mapping[str, Any], where: str, rule: str = "F1") -> None:
    """Refuse a file of another format or version.

    Raises:
        FormatError: Names what was found and what this version reads.
    """
    found = (record.get("format"), record.get("version"))
    if found == (FORMAT, VERSION):
        return
    advice = "Use the release of shardpack that wrote it, or build again."
    if found == (FORMAT, 1):
        advice = "Upgrade it with pack repack DATASET --out NEW."
    raise FormatError(
        f"{where}: found format {found[0]!r} version {found[1]!r}, this version reads {FORMAT!r} version {VERSION} "
        f"(rule {rule}). {advice}",
        rule,
    )


def parse_plan(data: bytes, where: str) -> Plan:
    """Parse a `plan.json` and check its version and fields.

    Raises:
        FormatError: It is no plan of this version.
    """
    try:
        plan = json.loads(data)
        check_version(plan, where, "F2")
    except (ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where}: is not JSON (rule F2). Build again with --overwrite.", "F2") from error
    if wrong := plan_problem(plan):
        raise FormatError(f"{where}: {wrong} (rule F2). Restore it, or build again.", "F2")
    return cast("Plan", plan)


def stored_columns(plan: Plan) -> Stored:
    """Return the part of a plan that says which columns shards have."""
    return {
        "position_ids": plan["position_ids"],
        "loss_mask": plan["loss_mask"],
        "loss_weights": plan["loss_weights"],
        "turn_ends": plan["turn_ends"],
        "align": plan["align"],
    }


def plan_problem(plan: Any) -> str | None:
    """Return what is wrong with the fields of a parsed plan, or None."""
    return (
        mismatch(plan, Plan)
        or size_problem(plan["seq_len"], plan["align"], plan["tokenizer"])
        or name_problem([source["name"] for source in plan["sources"]])
    )


def name_problem(names: Sequence[str]) -> str | None:
    """Return which name of a source cannot be, or None: names become parts of file names, metrics and settings."""
    for place, name in enumerate(names):
        if not re.fullmatch(SOURCE_NAME, name):
            return f"sources[{place}].name is {_short(name)!r}; expected letters, digits, and any of _.-"
        if name in names[:place]:
            return f"two of its sources have the name {name!r}"
    return None


def size_problem(seq_len: int, align: int, tokenizer: TokenizerPlan) -> str | None:
    """Return which size of a plan or manifest cannot be, or None."""
    for name, value, high in (("seq_len", seq_len, MAX_SEQ_LEN), ("align", align, seq_len)):
        if not 1 <= value <= high:
            return f"{name} is {value}; expected 1 to {high}"
    if not 1 <= tokenizer["vocab_size"] <= tokenizer["max_id"] + 1 <= 1 << 31:
        return f"its tokenizer has {tokenizer['vocab_size']} entries and the largest id {tokenizer['max_id']}"
    return f"seq_len is {seq_len}; expected a multiple of align, {align}" if seq_len % align else None


def differences(old: Plan, new: Plan) -> list[str]:
    """Return a phrase for each thing in which two plans differ, such as "seq_len 2048 there, 4096 here".

    What follows from something else (windows from files, ids from a tokenizer) is not said again.
    """
    left, right = ({**plan, **plan["packer"], "packer": plan["packer"]["name"]} for plan in (old, new))
    stored = ("position_ids", "loss_weights", "align")  # loss_mask and turn_ends follow from the records' options
    found = _changes("", left, right, ("seq_len", "packer", "max_segments", "seed", *stored, "recipe"))
    if old["tokenizer"] != new["tokenizer"]:
        sizes = [f"{plan['tokenizer']['vocab_size']:,}" for plan in (old, new)]
        found.append(f"another tokenizer or chat template (vocabulary of {sizes[0]} there, {sizes[1]} here)")
    before, after = ({source["name"]: source for source in plan["sources"]} for plan in (old, new))
    found += _membership("source", before.keys(), after.keys())
    for name in [name for name in before if name in after]:
        found += _source_changes(f"source {name}: ", before[name], after[name])
    if not found and list(before) != list(after):
        found.append(f"sources in the order {', '.join(before)} there, {', '.join(after)} here")
    return found or [f"windows of {old['part_bytes']:,} bytes there, {new['part_bytes']:,} here (--window-bytes)"]


def _changes(where: str, old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    return [
        f"{where}{key} {_short(old.get(key))} there, {_short(new.get(key))} here"
        for key in keys
        if old.get(key) != new.get(key)
    ]


def _membership(noun: str, before: Set[str], after: Set[str]) -> list[str]:
    """Name what is on one side only; of several, the first."""
    found = []
    for side, names in (("there", sorted(before - after)), ("here", sorted(after - before))):
        more = f" and {counted(len(names) - 1, f'other {noun}')}" if len(names) > 1 else ""
        found += [f"{noun} {names[0]}{more} only {side}"] if names else []
    return found


def _source_changes(where: str, old: SourcePlan, new: SourcePlan) -> list[str]:
    found = _changes(where, old["records"], new["records"], new["records"] | old["records"])
    before, after = ({file["name"]: file for file in source["files"]} for source in (old, new))
    found += [where + phrase for phrase in _membership("file", before.keys(), after.keys())]
    for name, file in before.items():
        if name in after and file["fingerprint"] != after[name]["fingerprint"]:
            found.append(f"{where}{name} has changed ({file['bytes']:,} bytes there, {after[name]['bytes']:,} here)")
    return found


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
