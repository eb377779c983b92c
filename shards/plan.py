"""What a dataset will hold, decided before the first byte: `plan.json`.

A plan has only what determines bytes: sources (names, sizes, fingerprints), tokenizer digest, options, packer, windows.
Workers, engines, paths and times are not in it, so they cannot change the result. `plan_id` is the sha256 of its
canonical JSON; every sidecar and shard names it, so work of another plan is never mistaken for this one's.
"""

import hashlib
import json
from collections.abc import Iterable, Set
from typing import Any

from shards.errors import FormatError, counted
from shards.publish import canonical
from shards.schema import FORMAT, VERSION

Plan = dict[str, Any]


def plan_id(plan: Plan) -> str:
    """Return the plan's identity: 64 hexadecimal digits."""
    return hashlib.sha256(canonical(plan)).hexdigest()


def check_version(record: dict[str, Any], where: str, rule: str = "F1") -> None:
    """Refuse a file of another format or version.

    Raises:
        FormatError: Names what was found and what this version reads.
    """
    found = (record.get("format"), record.get("version"))
    if found != (FORMAT, VERSION):
        raise FormatError(
            f"{where}: found format {found[0]!r} version {found[1]!r}, this version reads {FORMAT!r} version {VERSION} "
            f"(rule {rule}). "
            "Use the release of shardpack that wrote it, or build again.",
            rule,
        )


def parse_plan(data: bytes, where: str) -> Plan:
    """Parse and check the version of a `plan.json`."""
    try:
        plan = json.loads(data)
        check_version(plan, where, "F2")
    except (ValueError, AttributeError) as error:
        raise FormatError(f"{where}: is not JSON (rule F2). Build again with --overwrite.", "F2") from error
    return dict(plan)


def differences(old: Plan, new: Plan) -> list[str]:
    """Return a phrase for each thing in which two plans differ, such as "seq_len 2048 there, 4096 here".

    What follows from something else (windows from files, ids from a tokenizer) is not said again.
    """
    left, right = (plan | plan["packer"] | {"packer": plan["packer"]["name"]} for plan in (old, new))
    found = _changes("", left, right, ("seq_len", "packer", "max_segments", "seed", "position_ids", "recipe"))
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


def _changes(where: str, old: Plan, new: Plan, keys: Iterable[str]) -> list[str]:
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


def _source_changes(where: str, old: Plan, new: Plan) -> list[str]:
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
