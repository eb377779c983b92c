"""Parquet and Arrow files: what their metadata says, and their rows in record batches of a few MiB.

What a file is made of (row groups, record batches) is known without reading it, so windows can be cut from it. A batch
is validated before it is looked into: Arrow trusts the offsets in a file, and a wrong one kills the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pipeline.config import RecordOptions
from pipeline.sources.files import BATCH_BYTES, open_source
from pipeline.sources.parsing import changes_meaning, changes_targets, fields_of, usual_flags
from pipeline.sources.tokenized import token_fields
from pipeline.sources.windows import Slice, SourceFile
from shards.errors import SourceError, reason_of
from shards.fetching.remote import is_url

CONTINUES = b"\xff\xff\xff\xff"  # begins every message of an Arrow stream
STREAM_END = CONTINUES + bytes(4)
MAX_EXPANDED_BYTES = 256 << 20
SAMPLED_ROWS = 64  # of a Parquet file, to know what share of it the columns are that are read


class TableUnits(NamedTuple):
    """The units in which a table can be cut, from its metadata."""

    sizes: tuple[int, ...]
    "Parquet: bytes of each row group; Arrow: rows of each record batch."
    read_bytes: int
    "Uncompressed bytes of the columns that are read, in the whole file."


def parquet_units(location: str, name: str, options: RecordOptions) -> TableUnits:
    """Return the row groups of a Parquet file, by the uncompressed bytes of the columns that are read.

    Where only some columns are read, the first rows tell their share: the metadata of single columns would tell it
    exactly, but a damaged one ends the process inside pyarrow.

    Raises:
        SourceError: The file is not Parquet, or lacks the column of the text.
    """
    import pyarrow.parquet as pq

    with reading_as("Parquet", name), open_source(location) as stream:
        table = pq.ParquetFile(stream, buffer_size=1 << 20)  # reads pages, not the whole column of a row group
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        read, share, whole = columns_read(table.schema_arrow, name, options), 1, 1
        first = next(table.iter_batches(SAMPLED_ROWS), None) if len(read) < len(table.schema_arrow) else None
        if first is not None and first.nbytes:
            share, whole = sum(first.column(top).nbytes for top in read), first.nbytes
        sizes = tuple(max(group.total_byte_size * share // whole, min(group.num_rows, 1)) for group in groups)
    return TableUnits(sizes, sum(sizes))


def arrow_units(location: str, name: str, options: RecordOptions) -> TableUnits:
    """Return the record batches of a local Arrow file, and the bytes of the columns that are read.

    Raises:
        SourceError: The file is not Arrow, or lacks the column of the text.
    """
    rows, size = [], 0
    with reading_as("Arrow", name):
        for batch in arrow_batches(location):
            rows.append(batch.num_rows)
            read = columns_read(batch.schema, name, options)
            size += sum(batch.column(top).get_total_buffer_size() for top in read)
    return TableUnits(tuple(rows), max(size, sum(rows)))  # a column of nulls takes no byte


def columns_read(schema: Any, name: str, options: RecordOptions) -> list[str]:
    """Return the top-level columns that records of these options are made of: those of text and weights, or all.

    Raises:
        SourceError: Two columns have one name, or there is no column of the text.
    """
    names: list[str] = schema.names
    if twice := next((column for column in names if names.count(column) > 1), None):
        raise SourceError(f"{name}: has two columns {twice!r}; expected one of a name. Rename one.")
    if options.kind == "tokens":
        read = token_fields(names, options)
        if missing := next((column for column in read if column not in names), None):
            raise SourceError(f"{name}: no column {missing!r}, {fields_of(names)}; expected one of lists of integers.")
        return read
    if options.kind != "text":
        return names
    weights = options.weights_field
    wanted = [] if weights is None else [column for column in (weights, weights.split(".")[0]) if column in names]
    return list(dict.fromkeys([text_column(schema, name, options.text_field), *wanted[:1]]))


def fields_beside(schema: Any, read: list[str], options: RecordOptions) -> dict[str, Any]:
    """Return the columns that no record is made of and that look as if they changed what it means; they have a value.

    Looking at the values would mean to read images and the like for nothing: a column counts for each of its rows.
    """
    import pyarrow as pa

    rest = (field for field in schema if field.name not in read and not pa.types.is_null(field.type))
    counts = changes_targets if options.kind == "tokens" else changes_meaning
    return {field.name: True for field in rest if counts(field.name)}


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
        if "too much memory" in str(error):  # zstd's own limit
            raise SourceError(
                f"{name}: was compressed with a window of more than 128 MiB; expected a smaller one. "
                "Pipe it: zstd -dc --long=31 FILE | pack build -"
            ) from None
        raise SourceError(f"{name}: cannot be read as {kind} ({reason_of(error)}). Write the file again.") from None


def table_batches(
    file: SourceFile, slice_: Slice, options: RecordOptions
) -> Iterator[tuple[Any, int, int, dict[str, Any]]]:
    """Yield record batches of about BATCH_BYTES, the first row of each, its share of the file's bytes, `fields_beside`.

    A file may say a value once and use it in a million rows (dictionaries, views), so that neither its size nor its
    metadata tells what a batch takes. No value is larger than what it is stored in, so a batch of so few rows that each
    could be that large stays within MAX_EXPANDED_BYTES.
    """
    if file.format == "arrow":
        total = max(sum(file.units), 1)
        step = max(1, BATCH_BYTES * total // max(file.read_bytes or 1, 1))
        row = 0
        for batch in arrow_batches(file.location):
            if row >= slice_.stop:
                break
            columns = columns_read(batch.schema, file.name, options)
            read, beside = batch.select(columns), fields_beside(batch.schema, columns, options)
            few = min(step, rows_at_once(read))
            for start in range(max(slice_.start, row), min(slice_.stop, row + batch.num_rows), few):
                part = read.slice(start - row, min(few, slice_.stop - start))
                part.validate(full=True)  # Arrow trusts the offsets in a file, and a wrong one kills the process
                yield part, start, (file.bytes or 0) * part.num_rows // total, beside
            row += batch.num_rows
        return
    import pyarrow.parquet as pq

    with open_source(file.location) as stream:
        table = pq.ParquetFile(stream)
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        row = sum(group.num_rows for group in groups[: slice_.start])
        columns = columns_read(table.schema_arrow, file.name, options)
        beside = fields_beside(table.schema_arrow, columns, options)
        for number in range(slice_.start, slice_.stop):
            group = groups[number]
            step = max(1, min(1 << 16, BATCH_BYTES * group.num_rows // max(file.units[number], 1)))
            if options.kind != "tokens":  # integers are as large as they are
                step = min(step, few_rows(group.total_byte_size))
            for batch in table.iter_batches(step, row_groups=[number], columns=columns):
                weight = (file.bytes or 0) * batch.num_rows // max(table.metadata.num_rows, 1)
                yield batch, row, weight, beside
                row += batch.num_rows


def few_rows(stored_bytes: int) -> int:
    """Return how many values of that size MAX_EXPANDED_BYTES hold, at least 16: with fewer, reading is slow."""
    return max(16, MAX_EXPANDED_BYTES // max(stored_bytes, 1))


def rows_at_once(batch: Any) -> int:
    """Return how many rows of an Arrow record batch may be turned into Python values at once."""
    if any(map(_may_repeat, batch.schema.types)):
        return few_rows(batch.get_total_buffer_size())
    return max(int(batch.num_rows), 1)


def _may_repeat(kind: Any) -> bool:
    """Whether several rows of an Arrow type can share the bytes of one value."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _may_repeat(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind) or "view" in str(kind):
        return True
    return any(_may_repeat(kind.field(index).type) for index in range(kind.num_fields))


def text_column(schema: Any, name: str, text_field: str) -> str:
    """Return the top-level column that holds the text."""
    for column in (text_field, text_field.split(".")[0]):
        if column in schema.names:
            return column
    flags = usual_flags(schema.names) or "`text_field`"
    raise SourceError(
        f"{name}: no column {text_field!r}, {fields_of(schema.names)}; expected the text there. See {flags}."
    )
