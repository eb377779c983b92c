"""Slices of a corpus to records, in batches of about 4 MiB, so that memory never holds a window as objects.

Every fault has a name and a place: with `on_error="fail"` the first one stops the build, with "skip" it becomes a
`Rejected` entry. Blank lines are no records; of duplicate keys the last wins; NaN and Infinity pass, as Python writes
them. The hash covers the raw bytes of the lines and files read; for Parquet and Arrow, of which only some columns are
read, the JSON form of the values. `parsing.py` says what a record is, this file where it lies.
"""

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.sources.files import BATCH_BYTES, MAX_RECORD_BYTES, changed, open_source, too_long
from pipeline.sources.parsing import (
    BadRecord,
    Parser,
    excerpt,
    json_parser,
    row_parser,
    text_parser,
    texts_of,
    value_parser,
)
from pipeline.sources.tables import reading_as, table_batches
from pipeline.sources.token_files import open_tokens, token_ranges
from pipeline.sources.tokenized import TokenTable, table_of_batch
from pipeline.sources.values import canonical_json, column_values, rows_of
from pipeline.sources.windows import Slice, Source, SourceFile
from shards.errors import SourceError
from shards.fetching.remote import is_url, reaching

KEPT_CHARS, WINDOW_CHARS = 1 << 20, 16 << 20  # of one rejected record, and of all those of a window
LINE_SEARCH_BYTES = 1 << 30  # where more would have to be read to count lines, a place is a byte offset
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Rejected:
    """A bad record that was skipped."""

    index: int
    "Index in the window's reading order."
    where: str
    "File and place inside it."
    reason: str
    raw: str
    "The record as it stands in the file; cut off beyond KEPT_CHARS, or where a window has very many."

    def __str__(self) -> str:
        """Return place and fault, to stand inside a sentence."""
        return f"{self.where}: {self.reason.removesuffix('.')}"


class SliceRange(NamedTuple):
    """Which records of a window came from which slice."""

    file: int
    start: int
    stop: int
    first_index: int
    num_records: int


@dataclass(frozen=True)
class RecordBatch:
    """Some records of a window, in order."""

    values: list[Any]
    "Text (kind text) or the whole record as a dict (chat, instruction)."
    indices: npt.NDArray[np.int64]
    "Index of each value in the window's reading order; rejected records leave gaps. Shape (num_values,)."
    raw_bytes: int
    "Bytes of corpus behind this batch."
    where: Callable[[int], str] = field(repr=False)
    "where(index) -> file and place of a record of this batch: lines and records count from 1, rows from 0."
    reject: Callable[[int, str], None] = field(repr=False)
    "reject(index, reason): refuse one of the values after all, as a bad record of the reader."
    records: list[dict[str, Any]] | None = None
    "Kind text: the fields beside each text, as far as they were read; None where there are no fields."

    def head(self, number: int) -> "RecordBatch":
        """Return the first values."""
        records = None if self.records is None else self.records[:number]
        return replace(self, values=self.values[:number], indices=self.indices[:number], records=records)


class _Chunk(NamedTuple):
    """Records as they stand in a file."""

    raws: list[Any]
    size: int
    parser: Parser
    locate: Callable[[int], str]  # position in `raws` -> file and place
    held_bytes: int | None = None  # where records take other space than they do in the file
    beside: dict[str, Any] | None = None  # kind text: columns that are not read


class WindowReader:
    """Reads one window; iterate once, then look at the totals.

    Args:
        source: The source that the slices belong to.
        slices: What to read, in order.
        on_error: fail (the first bad record raises) or skip.
        payloads: The raw JSONL bytes of each slice, where the driver has read them.

    Iterating raises `SourceError` for a file that cannot be read or that changed, and with "fail" for a bad record.
    """

    def __init__(
        self,
        source: Source,
        slices: Sequence[Slice],
        *,
        on_error: str = "fail",
        payloads: Sequence[bytes] | None = None,
    ) -> None:
        self.source, self.on_error = source, on_error
        self.num_records = 0
        self.raw_bytes = 0
        self.rejected: list[Rejected] = []
        self.spans: list[SliceRange] = []
        self._slices, self._payloads = slices, payloads
        self._kept_chars = 0
        self._hash = xxhash.xxh3_128()
        self._lines_to = (-1, 0, 0)  # file, byte offset, lines before it

    @property
    def input_xxh3(self) -> str:
        """Hex xxh3_128 of what was read so far."""
        return self._hash.hexdigest()

    def raw_xxh3(self) -> str:
        """Read the window without parsing it, and return `input_xxh3` of all of it.

        What a sidecar holds of the window it was made from: another hash means that the corpus has changed since,
        wherever in a file. Use a reader of its own.

        Raises:
            SourceError: A file cannot be read, or has another size than the plan says.
        """
        for _ in self._all_chunks():
            pass
        return self.input_xxh3

    def __iter__(self) -> Iterator[RecordBatch]:
        waiting: list[_Chunk] = []
        size = 0
        for number, slice_ in enumerate(self._slices):
            first = self.num_records
            for chunk in self._slice_chunks(number):
                if waiting and waiting[0].parser is not chunk.parser:
                    yield self._batch(waiting)
                    waiting, size = [], 0
                waiting.append(chunk)
                size += chunk.size if chunk.held_bytes is None else chunk.held_bytes
                self.num_records += len(chunk.raws)
                if size >= BATCH_BYTES:
                    yield self._batch(waiting)
                    waiting, size = [], 0
            self.spans.append(SliceRange(*slice_, first, self.num_records - first))
        if waiting:
            yield self._batch(waiting)

    def _batch(self, chunks: list[_Chunk]) -> RecordBatch:
        """Parse chunks of one parser."""
        starts = [0]
        for chunk in chunks:
            starts.append(starts[-1] + len(chunk.raws))
        first = self.num_records - starts[-1]
        raws = chunks[0].raws if len(chunks) == 1 else [raw for chunk in chunks for raw in chunk.raws]

        def where(index: int) -> str:
            number = bisect_right(starts, index - first) - 1
            return chunks[number].locate(index - first - starts[number])

        parser = chunks[0].parser
        values, indices = parser.parse_batch(raws), np.arange(first, self.num_records)
        if values is None:
            values, kept = [], []
            for index, raw in enumerate(raws, first):
                try:
                    values.append(parser.parse_one(raw))
                    kept.append(index)
                except BadRecord as bad:
                    self._refuse(index, where(index), str(bad), raw)
            indices = np.array(kept, dtype=np.int64)
        size = sum(chunk.size for chunk in chunks)
        self.raw_bytes += size
        records = None if parser.text_field is None else values
        if any(chunk.beside for chunk in chunks):
            beside = [chunk.beside or {} for chunk in chunks for _ in chunk.raws]
            read = [{}] * len(indices) if records is None else records
            records = [beside[index - first] | record for index, record in zip(indices, read, strict=True)]
        if parser.text_field is not None:
            values = texts_of(values, parser.text_field) or []

        def reject(index: int, reason: str) -> None:
            self._refuse(index, where(index), reason, raws[index - first])

        return RecordBatch(values, indices, size, where, reject, records)

    def _note(self, raw: bytes) -> None:
        self._hash.update(raw)

    def _refuse(self, index: int, where: str, reason: str, raw: Any) -> None:
        if self.on_error == "fail":
            end = "" if reason.endswith(".") else ". Fix the record."
            raise SourceError(f'{where}: {reason}{end} Or use `on_error="skip"`.')
        kept = excerpt(raw, max(200, min(KEPT_CHARS, WINDOW_CHARS - self._kept_chars)))
        self._kept_chars += len(kept)
        self.rejected.append(Rejected(index, where, reason, kept))

    def _chunks(self, file: SourceFile, slice_: Slice) -> Iterator[_Chunk]:
        options = self.source.options
        with reaching(file.location, file.name):
            stamp = self._stamp(file)
            if file.format in ("parquet", "arrow"):
                yield from self._columns(file, slice_)
            elif file.format in ("npy", "bin", "megatron"):
                yield from self._token_ranges(file, slice_)
            elif file.format == "text" and options.text_unit == "file":
                if (file.bytes or 0) > MAX_RECORD_BYTES:
                    raise too_long(file.name)
                with open_source(file.location) as stream:
                    data = stream.read()
                self._note(data)
                yield _Chunk([data], len(data), text_parser(options), lambda _: file.name)
            else:
                yield from self._byte_range(file, slice_)
            if self._stamp(file) != stamp:
                raise changed(file.name)

    def _all_chunks(self) -> Iterator[_Chunk]:
        for number in range(len(self._slices)):
            yield from self._slice_chunks(number)

    def _slice_chunks(self, number: int) -> Iterator[_Chunk]:
        slice_ = self._slices[number]
        file = self.source.files[slice_.file]
        if self._payloads is None:
            return self._chunks(file, slice_)
        return self._payload_chunks(file, slice_, self._payloads[number])

    def _payload_chunks(self, file: SourceFile, slice_: Slice, payload: bytes) -> Iterator[_Chunk]:
        """Cut lines that the driver has read."""
        unit = "line" if file.format == "jsonl" else "record"
        for data, before in _cut(payload):
            yield self._lines(data, lambda: (unit, slice_.start + before), file, json_parser(self.source.options))  # noqa: B023

    def _stamp(self, file: SourceFile) -> tuple[int, int] | None:
        """Return what differs when a local file is written to."""
        if is_url(file.location):
            return None
        stat = os.stat(file.location)
        if stat.st_size != file.bytes:
            raise changed(file.name)
        return stat.st_size, stat.st_mtime_ns

    def _byte_range(self, file: SourceFile, slice_: Slice) -> Iterator[_Chunk]:
        """Read the lines whose first byte lies in the slice."""
        parser = json_parser(self.source.options) if file.format == "jsonl" else text_parser(self.source.options)
        opened = open_source(file.location)
        with io.BufferedReader(opened) if is_url(file.location) else opened as stream:  # type: ignore[type-var]
            at = max(slice_.start - 1, 0)
            stream.seek(at)
            if slice_.start:
                at += len(_rest_of_line(stream, file.name, b""))  # the tail of a line that belongs to the slice before
            while at < slice_.stop:
                asked = min(BATCH_BYTES, slice_.stop - at)
                data = stream.read(asked)
                if len(data) < asked:
                    raise changed(file.name)
                if not data.endswith(b"\n"):
                    data += _rest_of_line(stream, file.name, data)
                yield self._lines(data, self._counter(file, slice_.file, at), file, parser, starts_file=at == 0)
                at += len(data)

    def _lines(
        self,
        data: bytes,
        begin: Callable[[], tuple[str, int]],
        file: SourceFile,
        parser: Parser,
        *,
        starts_file: bool = False,
    ) -> _Chunk:
        """Split whole lines; `begin` gives, when asked, the unit to count in and how many came before."""
        self._note(data)
        body = data.removeprefix(BOM) if starts_file else data
        lines = [line for line in body.split(b"\n") if line and not line.isspace()]

        def locate(position: int) -> str:
            unit, before = begin()
            seen, offset = -1, 0
            for number, line in enumerate(data.split(b"\n")):
                seen += bool(line.removeprefix(BOM if starts_file and number == 0 else b"").strip())
                if seen == position:
                    return f"{file.name}, {unit} {before + (offset if unit == 'byte' else number + 1)}"
                offset += len(line) + 1
            raise AssertionError("the record lies in another chunk")

        return _Chunk(lines, len(data), parser, locate)

    def _counter(self, file: SourceFile, number: int, at: int) -> Callable[[], tuple[str, int]]:
        """Return a function that counts the lines before byte `at`, if that is quick, going on from the last count."""

        def count() -> tuple[str, int]:
            known, offset, lines = self._lines_to
            if known != number or offset > at:
                offset = lines = 0
            if at - offset > LINE_SEARCH_BYTES or is_url(file.location):
                return "byte", at
            with open_source(file.location) as stream:
                stream.seek(offset)
                while offset < at and (data := stream.read(min(BATCH_BYTES, at - offset))):
                    offset, lines = offset + len(data), lines + data.count(b"\n")
            self._lines_to = (number, offset, lines)
            return "line", lines

        return count

    def _columns(self, file: SourceFile, slice_: Slice) -> Iterator[_Chunk]:
        """Read row groups or rows: the column of the text, or all columns."""
        options = self.source.options
        alone, rows = value_parser(options), row_parser(options)
        with reading_as(file.format.capitalize(), file.name):
            for batch, row, size, beside in table_batches(file, slice_, options):
                if options.kind == "tokens":
                    yield self._table(table_of_batch(batch, options, beside), size, f"{file.name}, row", row)
                    continue
                whole = options.kind != "text" or options.weights_field is not None
                raws = rows_of(batch) if whole else column_values(batch.column(0))
                text = canonical_json(raws)
                self._note(text)
                place = partial(_row_place, file.name, row)
                parser = rows if whole and options.kind == "text" else alone
                yield _Chunk(raws, size, parser, place, len(text), beside)

    def _token_ranges(self, file: SourceFile, slice_: Slice) -> Iterator[_Chunk]:
        """Read documents of a file that holds ids and nothing else."""
        options = self.source.options
        tokens = open_tokens(file.location, file.name, file.format, options)
        document = slice_.start if tokens.documents is not None else 0
        unit = "document" if tokens.documents is not None else f"from token {slice_.start:,} on, document"
        for ragged in token_ranges(tokens, slice_.start, slice_.stop, file.name, options):
            table = TokenTable({options.ids_field: ragged})
            yield self._table(table, ragged.values.nbytes, f"{file.name}, {unit}", document)
            document += len(table)

    def _table(self, table: TokenTable, size: int, where: str, first: int) -> _Chunk:
        """Return a chunk of ids, which is a batch of its own."""
        self._note(table.digest())
        return _Chunk(table, size, Parser(_as_it_is, _as_it_is), lambda position: f"{where} {first + position}")  # type: ignore[arg-type]


def _row_place(name: str, first: int, position: int) -> str:
    return f"{name}, row {first + position}"


def _as_it_is(table: Any) -> Any:
    return table


def _rest_of_line(stream: IO[bytes], name: str, data: bytes) -> bytes:
    """Read on to the end of the line that `data` begins."""
    begun = len(data) - data.rfind(b"\n") - 1
    line = stream.readline(max(MAX_RECORD_BYTES - begun, 0) + 1)
    if begun + len(line) > MAX_RECORD_BYTES:
        raise too_long(name)
    return line


def _cut(payload: bytes) -> Iterator[tuple[bytes, int]]:
    """Cut raw lines into pieces of about BATCH_BYTES: (bytes, lines before)."""
    start = lines = 0
    while start < len(payload):
        end = payload.find(b"\n", start + BATCH_BYTES - 1) + 1 or len(payload)
        data = payload[start:end]
        yield data, lines
        start, lines = end, lines + data.count(b"\n")
