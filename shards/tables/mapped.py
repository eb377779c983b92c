"""Tables beside the shards (`shards.arrow`, `index.arrow`): written with flat memory, read as mapped columns.

Each is an uncompressed Arrow IPC stream of exactly one record batch, so that a column is one array of the file whatever
its length: a reader maps it and touches only the pages it asks for. Written column by column through scratch files,
since a batch cannot be appended to. Hashing a table of up to 64 MiB at every opening costs about 10 ms.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypedDict

import numpy as np
import pyarrow as pa
import xxhash

from shards.errors import FormatError
from shards.publish import Store, write
from shards.writer import arrow_array, write_stream

MAX_HASHED_BYTES = 64 << 20  # larger tables are hashed by `verify` only
RESTORE = "Restore it, or delete it and build with --resume."


class TableEntry(TypedDict):
    """What the manifest says of a table."""

    bytes: int
    xxh3_128: str
    rows: int


def write_table(store: Store, name: str, schema: pa.Schema, parts: Iterable[Mapping[str, np.ndarray]]) -> TableEntry:
    """Write a table from parts of its rows, in memory that does not grow with their number.

    Args:
        store: Where to publish.
        name: Final name.
        schema: Schema of the table, no lists in it.
        parts: Columns of each part, by name; those of type fixed_size_binary[k] as uint8 (n, k).
    """
    with ExitStack() as stack:
        files = {field.name: stack.enter_context(_scratch(store, f"{name}-{field.name}")) for field in schema}
        rows = 0
        for part in parts:
            for field in schema:
                column = np.ascontiguousarray(part[field.name])
                write(files[field.name], column.reshape(-1).view(np.uint8).data)
            rows += len(part[schema.names[0]])
        arrays = [arrow_array(_mapped(files[field.name]), field.type, rows) for field in schema]
        batch = pa.record_batch(arrays, schema=schema)
        _, written = write_stream(store, name, schema, [batch])
        del batch, arrays
    return {"rows": rows, **written}


@contextmanager
def _scratch(store: Store, name: str) -> Iterator[IO[bytes]]:
    path = store.scratch(name)
    try:
        with path.open("w+b", buffering=0) as file:
            yield file
    finally:
        path.unlink(missing_ok=True)


def _mapped(file: IO[bytes]) -> Any:
    size = file.seek(0, 2)
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""


def map_table(path: Path, schema: pa.Schema, entry: TableEntry, rule: str) -> dict[str, np.ndarray]:
    """Map a table as columns.

    Args:
        path: The file.
        schema: The schema that it must have.
        entry: What the manifest says of it.
        rule: The rule that says so.

    Returns:
        Read-only views on the map, by name; fixed_size_binary[k] as uint8 (n, k).

    Raises:
        FormatError: The file is missing or damaged, or is not this table.
    """
    check_size(path, entry["bytes"], rule)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if entry["bytes"] else b""
    return view_table(mapped, str(path), schema, entry, rule)


def view_table(
    data: mmap.mmap | bytes, where: str, schema: pa.Schema, entry: TableEntry, rule: str
) -> dict[str, np.ndarray]:
    """Return the columns of a table whose bytes are at hand; `where` names it, all else is as in `map_table`."""
    if len(data) <= MAX_HASHED_BYTES and xxhash.xxh3_128_hexdigest(data) != entry["xxh3_128"]:
        raise FormatError(f"{where}: does not match its checksum in the manifest (rule {rule}). {RESTORE}", rule)
    buffer = pa.py_buffer(data)
    try:
        with pa.ipc.open_stream(pa.BufferReader(buffer)) as stream:
            batches = list(stream)
            found = stream.schema
        for batch in batches:
            batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{where}: is not a readable Arrow stream (rule {rule}). {RESTORE}", rule) from error
    rows = [batch.num_rows for batch in batches]
    if not found.equals(schema) or rows != [entry["rows"]]:
        raise FormatError(
            f"{where}: has batches of {rows} rows with columns {column_names(found)}; expected one of "
            f"{entry['rows']:,} with {schema.names} (rule {rule}). {RESTORE}",
            rule,
        )
    return {field.name: _column(batches[0].column(field.name), buffer, where, rule) for field in schema}


def _column(array: pa.Array, whole: pa.Buffer, where: str, rule: str) -> np.ndarray:
    """Return a column as a view, once it is certain that it lies in the file."""
    values = array.buffers()[-1]
    binary = pa.types.is_fixed_size_binary(array.type)
    width = array.type.byte_width if binary else array.type.bit_width // 8
    kind = np.uint8 if binary else array.type.to_pandas_dtype()
    if not len(array):
        return np.empty((0, width) if binary else 0, kind)
    inside = values is not None and whole.address <= values.address <= values.address + values.size <= (
        whole.address + whole.size
    )
    if array.null_count or array.offset or not inside or values.size < len(array) * width:
        raise FormatError(f"{where}: has a column with nulls or of a wrong size (rule {rule}). {RESTORE}", rule)
    flat: np.ndarray = np.frombuffer(values, kind, len(array) * (width if binary else 1))
    return flat.reshape(len(array), width) if binary else flat


def column_names(schema: pa.Schema) -> list[str]:
    """Return the names of a schema's columns, for messages: those of a damaged file may be no text."""
    try:
        return list(schema.names)
    except UnicodeDecodeError:
        return ["(unreadable)"]


def check_size(path: Path, expected_bytes: int, rule: str = "F3") -> None:
    """Raise FormatError unless `path` is a file of exactly `expected_bytes`: a shorter one would crash under a map."""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FormatError(
            f"{path}: is missing; the manifest lists {expected_bytes:,} bytes (rule {rule}). "
            "Restore it, or build with --resume.",
            rule,
        ) from error
    if size != expected_bytes or not path.is_file():
        raise FormatError(
            f"{path}: has {size:,} bytes, the manifest says {expected_bytes:,} (rule {rule}). {RESTORE}", rule
        )
