"""Parquet and Arrow files: what their metadata says, and their rows in record batches of a few MiB.

What a file is made of (row groups, record batches) is known without reading it, so windows can be cut from it. A batch
is validated before it is looked into: Arrow trusts the offsets in a file, and a wrong one kills the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from pipeline.sources.files import BATCH_BYTES, is_url, open_source
from pipeline.sources.parsing import fields_of, usual_flags
from pipeline.sources.windows import Slice, SourceFile
from shards.errors import SourceError, reason_of

CONTINUES = b"\xff\xff\xff\xff"  # begins every message of an Arrow stream
STREAM_END = CONTINUES + bytes(4)


def parquet_units(location: str, name: str) -> tuple[int, ...]:
    """Return the uncompressed bytes of each row group.

    Raises:
        SourceError: The file is not Parquet.
    """
    import pyarrow.parquet as pq

    with reading_as("Parquet", name), open_source(location) as stream:
        metadata = pq.ParquetFile(stream).metadata
        return tuple(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def arrow_units(location: str, name: str) -> tuple[int, ...]:
    """Return the rows of each record batch of a local Arrow file; nothing for a URL.

    Raises:
        SourceError: The file is not Arrow.
    """
    if is_url(location):
        return ()
    with reading_as("Arrow", name):
        return tuple(batch.num_rows for batch in arrow_batches(location))


def arrow_batches(location: str) -> Iterator[Any]:
    """Yield the record batches of an Arrow file; a local one is mapped, not copied."""
    import pyarrow as pa

    source: Any = pa.PythonFile(open_source(location), mode="r") if is_url(location) else pa.memory_map(location)
    with source:
        yield from ipc_batches(source)


def ipc_batches(source: Any) -> Iterator[Any]:
    """Yield the record batches of an Arrow IPC stream or file, opened by pyarrow."""
    import pyarrow as pa

    head = source.read(6)
    source.seek(0)
    if head == b"ARROW1":
        reader = pa.ipc.open_file(source)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    if head.startswith(CONTINUES):  # not the older form, whose end is harder to tell from data
        source.seek(max(0, source.size() - 8))
        if source.read(8) != STREAM_END:  # cut between two batches it would read as a whole, shorter stream
            raise pa.ArrowInvalid("the mark at the end of the stream is missing, the file seems cut off")
        source.seek(0)
    yield from pa.ipc.open_stream(source)


@contextmanager
def reading_as(kind: str, name: str) -> Iterator[None]:
    """Turn what pyarrow raises for a file that is not what its name says into a `SourceError`."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name}: cannot be read as {kind} ({reason_of(error)}). Write the file again.") from None


def table_batches(file: SourceFile, slice_: Slice, text_field: str | None) -> Iterator[tuple[Any, int, int]]:
    """Yield record batches of about BATCH_BYTES, the first row of each, and its share of the file's bytes."""
    if file.format == "arrow":
        total = max(sum(file.units), 1)
        step = max(1, BATCH_BYTES * total // max(file.bytes or 1, 1))
        row = 0
        for batch in arrow_batches(file.location):
            if row >= slice_.stop:
                break
            for start in range(max(slice_.start, row), min(slice_.stop, row + batch.num_rows), step):
                part = _select(batch.slice(start - row, min(step, slice_.stop - start)), file.name, text_field)
                part.validate(full=True)  # Arrow trusts the offsets in a file, and a wrong one kills the process
                yield part, start, (file.bytes or 0) * part.num_rows // total
            row += batch.num_rows
        return
    import pyarrow.parquet as pq

    with open_source(file.location) as stream:
        table = pq.ParquetFile(stream)
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        row = sum(group.num_rows for group in groups[: slice_.start])
        for number in range(slice_.start, slice_.stop):
            group = groups[number]
            step = max(1, min(1 << 16, BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)))
            column = None if text_field is None else [text_column(table.schema_arrow, file.name, text_field)]
            for batch in table.iter_batches(step, row_groups=[number], columns=column):
                weight = (file.bytes or 0) * batch.num_rows // max(table.metadata.num_rows, 1)
                yield _select(batch, file.name, text_field), row, weight
                row += batch.num_rows


def text_column(schema: Any, name: str, text_field: str) -> str:
    """Return the top-level column that holds the text."""
    for column in (text_field, text_field.split(".")[0]):
        if column in schema.names:
            return column
    flags = usual_flags(schema.names) or "--text-field"
    raise SourceError(
        f"{name}: no column {text_field!r}, {fields_of(schema.names)}; expected the text there. See {flags}."
    )


def _select(batch: Any, name: str, text_field: str | None) -> Any:
    return batch if text_field is None else batch.select([text_column(batch.schema, name, text_field)])


def column_values(column: Any) -> list[Any]:
    """Return a column as Python values; bytes where a string is not UTF-8, so that only that row is bad."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        import pyarrow as pa

        values = []
        for item in column:
            try:
                values.append(item.as_py())
            except UnicodeDecodeError:
                values.append(item.cast(pa.large_binary()).as_py())
    return values


def canonical_json(values: list[Any]) -> bytes:
    """Return the JSON form of values, which the hash of a window covers."""
    try:
        return orjson.dumps(values, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # a number beyond 64 bits, or the like
        return repr(values).encode("utf-8", "surrogatepass")
