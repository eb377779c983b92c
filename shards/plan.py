"""What a dataset will hold, decided before the first byte: `plan.json`.

A plan has only what determines bytes: sources (names, sizes, fingerprints), tokenizer digest, options, packer, windows.
Workers, engines, paths and times are not in it, so they cannot change the result. `plan_id` is the sha256 of its
canonical JSON; every sidecar and shard names it, so work of another plan is never mistaken for this one's.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from shards.errors import FormatError
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


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield one phrase for each place where two plans differ, such as "seq_len: 2048 there, 4096 here"."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for position, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from differences(left, right, f"{path}[{position}]")
    elif old != new:
        yield f"{path}: {_short(old)} there, {_short(new)} here"


def _short(value: Any) -> str:
    text = f"{len(value)} entries" if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
