"""Files that cannot be cut without reading them, cut while reading into JSONL windows of a fixed size.

Compressed JSONL and stdin pass through as they are; JSON arrays, CSV and compressed text and tables are written again
as one JSON object per line. A row that cannot be written so becomes `{FAULT: reason}`, which the reader rejects: the
driver parses nothing it need not, and every fault is reported in one place.
"""

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, Self

import orjson

from pipeline.sources.files import MAX_RECORD_BYTES, foreign_kind, is_lines, open_source, refuse_foreign, too_long
from pipeline.sources.json_elements import json_elements
from pipeline.sources.parsing import FAULT
from pipeline.sources.tables import arrow_batches, few_rows, ipc_batches, reading_as, rows_at_once
from pipeline.sources.values import rows_of
from pipeline.sources.windows import Slice, Source, SourceFile
from shards.errors import SourceError, counted
from shards.fetching.remote import reaching

CHUNK_BYTES = 1 << 20
MAX_TABLE_BYTES = 1 << 30  # of a table that is held because it cannot be read from its place


class StreamedWindow(NamedTuple):
    """What a window of streamed files holds."""

    slices: tuple[Slice, ...]
    "The lines of each file, counted from 0 in what the file gives as JSONL."
    payloads: tuple[bytes, ...]
    "The raw JSONL bytes of each slice."


class Meter:
    """Counts the bytes of streamed files that were read, as they are stored: compressed where they are."""

    def __init__(self) -> None:
        self.bytes = 0


class _MeteredStream:
    """A stream that tells its meter what is read of it."""

    def __init__(self, stream: IO[bytes], meter: Meter) -> None:
        self._stream, self._meter = stream, meter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._meter.bytes += len(data)
        return data

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def close(self) -> None:
        self._stream.close()


def stream_windows(
    source: Source, files: Iterable[int], window_bytes: int, meter: Meter | None = None
) -> Iterator[StreamedWindow]:
    """Read streamed files one after another, and cut them at line ends as if they were one.

    Small files share a window, a large one gives several. Each window is the shortest of at least `window_bytes`
    (the last: what is left), so that windows follow from the files and that size alone.

        files of 3, 3 and 9 lines of a byte each, windows of 4 bytes: [3 + 1], [2 + 2], [4], [3]

    Args:
        source: Whose files are read.
        files: Their indices.
        window_bytes: Minimum size of a window, as JSONL.
        meter: Counts what is read.

    Raises:
        SourceError: A file cannot be read, decompressed or framed.
    """
    meter = meter or Meter()
    slices: list[Slice] = []
    payloads: list[bytes] = []
    room = window_bytes
    for file in files:
        buffer, line, searched = bytearray(), 0, 0
        for chunk in _chunks(source.files[file], source, meter):
            buffer += chunk
            while len(buffer) >= room:
                end = buffer.find(b"\n", max(room - 1, searched)) + 1
                if not end:
                    searched = len(buffer)
                    break
                payloads.append(bytes(memoryview(buffer)[:end]))
                del buffer[:end]
                count, searched = payloads[-1].count(b"\n"), 0
                slices.append(Slice(file, line, line + count))
                yield StreamedWindow(tuple(slices), tuple(payloads))
                slices, payloads, room = [], [], window_bytes
                line += count
        if buffer:
            slices.append(Slice(file, line, line + buffer.count(b"\n") + (not buffer.endswith(b"\n"))))
            payloads.append(bytes(buffer))
            room -= len(buffer)
            if room <= 0:
                yield StreamedWindow(tuple(slices), tuple(payloads))
                slices, payloads, room = [], [], window_bytes
    if slices:
        yield StreamedWindow(tuple(slices), tuple(payloads))


def _chunks(file: SourceFile, source: Source, meter: Meter) -> Iterator[bytes]:
    """Yield JSONL bytes in pieces of any size."""
    with reaching(file.location, file.name):
        if file.format == "arrow" and file.compression is None and file.location != "-":
            with reading_as("Arrow", file.name):
                yield from _join(_rows(arrow_batches(file.location)))
            meter.bytes += file.bytes or 0  # mapped, so known at its end only
        elif file.compression is None:
            with _opened(file, meter) as stream:
                yield from _framed(file, source, stream)
        else:
            with reading_as(file.compression, file.name), _opened(file, meter) as stream:
                yield from _framed(file, source, stream)


def _opened(file: SourceFile, meter: Meter) -> Any:
    """Open and decompress."""
    import pyarrow as pa

    stream = _MeteredStream(sys.stdin.buffer if file.location == "-" else open_source(file.location), meter)
    if file.compression is None:
        return stream
    # Unlike the zstandard package, this notices a stream that ends too early.
    return pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), file.compression)


def _framed(file: SourceFile, source: Source, stream: IO[bytes]) -> Iterator[bytes]:
    head = stream.read(CHUNK_BYTES)
    whole_text = file.format == "text" and source.options.text_unit == "file"
    if not whole_text and file.format not in ("parquet", "arrow"):
        refuse_foreign(head, file.name)
    head = head.removeprefix(b"\xef\xbb\xbf")
    chunks = _rest(head, stream)
    if file.format in ("parquet", "arrow"):
        yield from _join(_table_rows(file.format, _held(file.name, chunks, MAX_TABLE_BYTES)))
    elif file.format == "jsonl" or (file.format == "json" and is_lines(head)):
        yield from _bounded(file.name, chunks)
    elif file.format == "json":
        yield from _join(json_elements(file.name, chunks))
    elif file.format in ("csv", "tsv"):
        yield from _join(_csv_rows(file, _bounded(file.name, chunks)))
    elif whole_text:
        yield from _join(_texts(source, [_held(file.name, chunks, MAX_RECORD_BYTES)]))
    else:
        yield from _join(_texts(source, _lines(_bounded(file.name, chunks))))


def _rest(head: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    while head:
        yield head
        head = stream.read(CHUNK_BYTES)


def _bounded(name: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pass chunks on, and refuse a line that does not end."""
    length = 0
    for chunk in chunks:
        last = chunk.rfind(b"\n")
        length = length + len(chunk) if last < 0 else len(chunk) - last - 1
        if length > MAX_RECORD_BYTES:
            raise too_long(name)
        yield chunk


def _held(name: str, chunks: Iterable[bytes], limit: int) -> bytes:
    """Return all chunks as one, up to a limit."""
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > limit:
            raise SourceError(
                f"{name}: gives more than {limit >> 20:,} MiB, larger than what is held at once. "
                "Decompress it into a file, or split it."
            )
    return bytes(content)


def _join(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Gather lines without their ends into chunks."""
    waiting: list[bytes] = []
    size = 0
    for line in lines:
        waiting.append(line)
        size += len(line) + 1
        if size >= CHUNK_BYTES:
            yield b"\n".join([*waiting, b""])
            waiting, size = [], 0
    if waiting:
        yield b"\n".join([*waiting, b""])


def _dump(record: Any) -> bytes:
    try:
        return orjson.dumps(record, default=str)
    except TypeError as error:  # text that is not UTF-8, or a key that is not text
        return orjson.dumps({FAULT: f"cannot be written as JSON ({error})"})


def _table_rows(kind: str, content: bytes) -> Iterator[bytes]:
    """Turn a table that is not a plain file here into one line per row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = pa.BufferReader(content)
    if kind == "arrow":
        yield from _rows(ipc_batches(source))
        return
    table = pq.ParquetFile(source)
    for number in range(table.metadata.num_row_groups):
        step = min(1024, few_rows(table.metadata.row_group(number).total_byte_size))
        yield from _rows(table.iter_batches(step, row_groups=[number]))


def _rows(batches: Iterable[Any]) -> Iterator[bytes]:
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts the offsets in a file, and a wrong one kills the process
        step = rows_at_once(batch)
        for start in range(0, batch.num_rows, step):
            yield from map(_dump, rows_of(batch.slice(start, step)))


def _texts(source: Source, units: Iterable[bytes]) -> Iterator[bytes]:
    """Turn a text file, or its lines, into records of the text field."""
    whole = source.options.text_unit == "file"
    for unit in units:
        try:
            text = unit.decode("utf-8")
        except UnicodeDecodeError as error:
            foreign = foreign_kind(unit) if whole else None
            fault = foreign or f"invalid UTF-8: byte 0x{unit[error.start]:02x} at byte {error.start}"
            yield orjson.dumps({FAULT: fault})
            continue
        if whole or text.strip():
            yield orjson.dumps({source.options.text_field: text if whole else text.removesuffix("\r")})


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    left = b""
    for chunk in chunks:
        *lines, left = (left + chunk).split(b"\n")
        yield from lines
    yield left


def _csv_rows(file: SourceFile, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Turn rows into objects of text by the header; a row of another width is a fault."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    text = io.TextIOWrapper(io.BufferedReader(_Reader(chunks)), encoding="utf-8", errors="surrogateescape", newline="")
    rows = csv.reader(text, delimiter="\t" if file.format == "tsv" else ",", strict=True)
    try:
        header = next(rows, [])
        if twice := next((name for name in header if name and header.count(name) > 1), None):
            raise SourceError(f"{file.name}: has two columns {twice!r}; expected one of a name. Rename one.")
        for row in rows:
            odd = next((place for place, field in enumerate(row) if not field.isascii() and _lone(field)), None)
            if row and len(row) != len(header):
                yield _fault(row, f"{counted(len(row), 'field')} where the header has {len(header):,}")
            elif odd is not None:
                byte = ord(_lone(row[odd])) - 0xDC00
                yield _fault(row, f"invalid UTF-8 in {header[odd]!r}, byte 0x{byte:02x}; expected UTF-8")
            elif row:
                yield _dump(dict(zip(header, row, strict=True)))
    except csv.Error as error:
        kind = file.format.upper()
        raise SourceError(f"{file.name}, line {rows.line_num}: not {kind} ({error}). Fix the file.") from None


def _lone(field: str) -> str:
    """Return the first byte that was no UTF-8, as `surrogateescape` keeps it; empty where all was."""
    return next((character for character in field if "\udc80" <= character <= "\udcff"), "")


def _fault(row: list[str], reason: str) -> bytes:
    """Return the line that stands for a bad row: the reason, and what the row holds, odd bytes as \\x.."""
    kept = [field.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for field in row]
    return orjson.dumps({FAULT: [reason, kept]})


class _Reader(io.RawIOBase):
    """Chunks of bytes as a file that TextIOWrapper reads."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = next(self._chunks, b"")
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count
