"""Arrow columns to the plain Python values that the same records give as JSON.

Arrow stores records under one type, and what that adds or changes is undone here, so that a conversation gives the same
tokens from JSONL, Parquet, Arrow, a saved dataset or the hub:

    {"x": 1}, {"y": 2} under one struct type    ->  the nulls for "y" and "x" that alignment made are left out
    arrow.json (the Json type of `datasets`)    ->  the value that the text spells
    map<string, int>                            ->  an object
    timestamp, date, time                       ->  text, as ISO 8601

Only a message keeps a null: its "content", where it has a "role".
"""

from collections.abc import Callable
from datetime import date, time
from functools import lru_cache
from typing import Any

import orjson

Convert = Callable[[Any], Any]


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a record batch as objects; a column's own null stays, those inside of structs do not."""
    columns = {name: column_values(batch.column(index)) for index, name in enumerate(batch.schema.names)}
    if not columns:
        return [{} for _ in range(batch.num_rows)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def column_values(column: Any) -> list[Any]:
    """Return a column as Python values; bytes where a string is not UTF-8, so that only that row is bad."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value_of(item) for item in column]
    convert = _conversion(column.type)
    return values if convert is None else [None if value is None else convert(value) for value in values]


def canonical_json(values: list[Any]) -> bytes:
    """Return the JSON form of values, which the hash of a window covers."""
    try:
        return orjson.dumps(values, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # a number beyond 64 bits, or the like
        return repr(values).encode("utf-8", "surrogatepass")


def _value_of(item: Any) -> Any:
    """Return the value of a scalar; bytes where it is text that is not UTF-8, None where it holds such text."""
    import pyarrow as pa

    try:
        return item.as_py()
    except UnicodeDecodeError:
        nested = pa.types.is_nested(item.type)
        return None if nested else item.cast(pa.large_binary()).as_py()


@lru_cache(maxsize=256)
def _conversion(kind: Any) -> Convert | None:
    """Return what turns a value of an Arrow type, not null, into its JSON form; None where it is that already."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _parsed if kind.extension_name == "arrow.json" else _conversion(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _conversion(kind.value_type)
    if pa.types.is_struct(kind):
        return _struct_conversion({field.name: _conversion(field.type) for field in kind})
    if pa.types.is_map(kind):
        item = _conversion(kind.item_type) or _same
        return lambda pairs: {key: None if value is None else item(value) for key, value in pairs}
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):  # every kind of list
        inner = _conversion(kind.value_type)
        return inner and (lambda items: [None if item is None else inner(item) for item in items])
    return _iso if pa.types.is_temporal(kind) else None


def _struct_conversion(fields: dict[str, Convert | None]) -> Convert:
    kept = {"content"} if {"role", "content"} <= fields.keys() else set()

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, item in value.items():
            inner = fields[name]
            if item is not None:
                found[name] = item if inner is None else inner(item)
            elif name in kept:
                found[name] = None
        return found

    return convert


def _parsed(text: Any) -> Any:
    """Return the value that JSON text spells, or the text where it spells none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _iso(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _same(value: Any) -> Any:
    return value
