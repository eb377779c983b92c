"""What a record is: raw bytes or column values to text or objects, and a name for everything that is not one.

`parse_batch` is the fast path (one C call per record) and returns None if any record is bad; `parse_one` then says
which, and why.
"""

import json
import re
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from pipeline.config import RecordOptions
from pipeline.sources.files import foreign_kind

FAULT = "shardpack: unreadable row"  # the only key of a line that stands for one: the reason, or [reason, row]
_FAULT_LINE = b'{"%s":' % FAULT.encode()
MEANING = re.compile(
    r"(system|system_?prompt|instructions?|inputs?|contexts?|documents?|history|tools?|functions?|images?|audios?|videos?"
    r"|chat_template_kwargs|reject(ed)?|chosen)$|.*(mask|loss|weight|train|supervis|ignore)",
    re.IGNORECASE,
)
KINDS = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", bytes: "bytes, not UTF-8 text"}


class BadRecord(Exception):
    """A record that cannot be used; the message says why, without a place."""


class Parser(NamedTuple):
    """How raw records become values."""

    parse_batch: Callable[[list[Any]], list[Any] | None]
    parse_one: Callable[[Any], Any]
    text_field: str | None = None
    "Kind text: the field of each value, an object, in which its text stands; None where values are what is wanted."


@lru_cache(maxsize=64)
def json_parser(options: RecordOptions) -> Parser:
    """Return the parser of JSON lines."""
    if options.kind != "text":
        return Parser(_parse_objects, parse_object)

    def parse_batch(lines: list[bytes]) -> list[Any] | None:
        records = _parse_objects(lines)
        return None if records is None or texts_of(records, options.text_field) is None else records

    def parse_one(line: bytes) -> dict[str, Any]:
        return _with_text(parse_object(line), options.text_field)

    return Parser(parse_batch, parse_one, options.text_field)


@lru_cache(maxsize=64)
def text_parser(options: RecordOptions) -> Parser:
    """Return the parser of plain text: whole files as they stand, lines without their ends; a BOM is left out."""
    whole = options.text_unit == "file"

    def parse_one(raw: bytes) -> Any:
        try:
            text = raw.decode("utf-8-sig" if whole else "utf-8")
        except UnicodeDecodeError as error:
            raise BadRecord((foreign_kind(raw) if whole else None) or _not_utf8(raw, error)) from None
        text = text if whole else text.removesuffix("\r")
        return text if options.kind == "text" else {options.text_field: text}

    return Parser(lambda raws: None, parse_one)


@lru_cache(maxsize=64)
def value_parser(options: RecordOptions) -> Parser:
    """Return the parser of column values: the text column's values, or whole rows."""
    if options.kind != "text":
        return Parser(lambda rows: rows, lambda row: row)
    head, _, rest = options.text_field.partition(".")

    def parse_batch(values: list[Any]) -> list[Any] | None:
        return values if set(map(type, values)) <= {str} else None

    def parse_one(value: Any) -> str:
        return text_of({head: value}, options.text_field) if rest and not isinstance(value, str) else _text(value, head)

    return Parser(parse_batch, parse_one)


@lru_cache(maxsize=64)
def row_parser(options: RecordOptions) -> Parser:
    """Return the parser of whole rows of kind text, of which more than the text is read."""

    def parse_batch(rows: list[Any]) -> list[Any] | None:
        return None if texts_of(rows, options.text_field) is None else rows

    return Parser(parse_batch, lambda row: _with_text(row, options.text_field), options.text_field)


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse one JSON line.

    Raises:
        BadRecord: It is not JSON in UTF-8, or not an object.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _parse_slowly(line)
    if not isinstance(record, dict):
        raise BadRecord(f"{name_of(record)}; expected a JSON object")
    if len(record) == 1 and FAULT in record:
        fault = record[FAULT]
        raise BadRecord(str(fault[0] if isinstance(fault, list) and fault else fault))
    return record


def text_of(record: dict[str, Any], path: str) -> str:
    """Return the text of a field; dots reach into nested objects where no field has the whole name.

    Raises:
        BadRecord: There is no such field, or it holds no text.
    """
    value: Any = record
    if path in record:
        return _text(record[path], path)
    keys = path.split(".")
    for depth, key in enumerate(keys):
        if depth and not isinstance(value, dict):
            above = ".".join(keys[:depth])
            raise BadRecord(f"field {path!r}: {above!r} is {name_of(value)}; expected an object with {key!r}")
        if key not in value:
            flags = usual_flags(record) or "`text_field`"
            raise BadRecord(f"no field {path!r}, {fields_of(record)}; expected the text there (see {flags})")
        value = value[key]
    return _text(value, path)


def texts_of(records: list[Any], path: str) -> list[str] | None:
    """Return the text of each record, or None where one has none."""
    try:
        values = [record[path] if path in record else text_of(record, path) for record in records]
    except BadRecord:
        return None
    return values if set(map(type, values)) <= {str} else None


def changes_meaning(name: str) -> bool:
    """Whether a field's name says that it changes what its record means, unlike that of an id or a date."""
    return MEANING.match(name) is not None


def changes_targets(name: str) -> bool:
    """Whether a field beside token ids looks as if it said what they mean, above all which of them are targets."""
    return changes_meaning(name) or name.lower() in ("labels", "label_ids", "targets", "target_ids")


def name_of(value: Any) -> str:
    """Say what kind of JSON value this is."""
    return KINDS.get(type(value)) or f"{'text' if isinstance(value, str) else 'a number'} ({value!r:.40})"


def fields_of(names: Collection[str]) -> str:
    """Say which fields a record has, after the one that it has not."""
    return f"only {', '.join(map(repr, list(names)[:20]))}" if names else "and no other either"


def usual_flags(names: Collection[str]) -> str:
    """Return the options that read records of these fields, where they have their usual names; empty otherwise."""
    for name in ("messages", "conversations", "conversation"):
        if name in names:
            return f'`messages_field="{name}"`'
    both = {"prompt", "completion"} <= {*names}
    return '`prompt_field="prompt"` and `completion_field="completion"`' if both else ""


def excerpt(raw: Any, limit: int) -> str:
    """Return a raw record as printable text, at most `limit` characters from its beginning."""
    if isinstance(raw, bytes):
        row = _row_behind(raw) if raw.startswith(_FAULT_LINE) else raw
        return row[: 4 * limit].decode("utf-8", "backslashreplace")[:limit]
    return str(raw)[:limit]


def _row_behind(line: bytes) -> bytes:
    """Return the row that a line of a fault stands for, as JSON, where it holds one."""
    fault = orjson.loads(line)[FAULT]
    return orjson.dumps(fault[-1]) if isinstance(fault, list) else line


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"field {path!r} is {name_of(value)}; expected text")
    return value


def _with_text(record: dict[str, Any], path: str) -> dict[str, Any]:
    text_of(record, path)
    return record


def _parse_objects(lines: list[bytes]) -> list[Any] | None:
    try:
        records = list(map(orjson.loads, lines))
    except orjson.JSONDecodeError:
        return None
    return records if all(type(record) is dict and FAULT not in record for record in records) else None


def _parse_slowly(line: bytes) -> Any:
    """Find out what is wrong with a line that the fast parser refused, or accept what Python's own accepts."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(_not_utf8(line, error)) from None
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        if "\0" in text:
            raise BadRecord(f"NUL byte at column {text.index(chr(0)) + 1}; expected JSON") from None
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        hint = ", the line seems cut off" if cut else ""
        what = f"{error.msg.removesuffix(' at')} at column {error.pos + 1}{hint}"  # some messages end in 'at'
        raise BadRecord(f"not JSON ({what}); expected one object") from None
    except UnicodeEncodeError as error:
        surrogate = ord(error.object[error.start])
        raise BadRecord(f"lone surrogate U+{surrogate:04X}; expected text that UTF-8 can hold") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise BadRecord(f"JSON that cannot be read ({error}); expected one object") from None
    return record


def _not_utf8(raw: bytes, error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8, byte 0x{raw[error.start]:02x} at column {error.start + 1}; expected UTF-8"
