"""Files to windows, by order and sizes alone, so that any worker finds its own slice.

A line belongs to the slice in which its first byte lies; a row group or a whole text file to the window in which it
begins. What cannot be cut without reading it (`is_streamed`) is cut while reading, by `streams.py`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.config import MIB, RecordOptions
from shards.fetching.remote import is_url
from shards.plan import FilePlan


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `as_plan` is what identifies it, wherever it lies."""

    name: str
    "Path below the SOURCE argument, with '/': stable when the corpus moves."
    location: str
    "Absolute path or URL; '-' for stdin."
    bytes: int | None
    "Size; None where it is unknown."
    format: str
    "A value of SUFFIXES."
    compression: str | None
    "gzip, zstd or None."
    fingerprint: str
    "Cheap content fingerprint; empty for stdin."
    units: tuple[int, ...] = field(default=(), repr=False)
    "Parquet: bytes of each row group, of what is read. Arrow: rows of each batch. Ids: tokens, or documents."
    read_bytes: int | None = field(default=None, repr=False)
    "Parquet and Arrow: uncompressed bytes of the columns that are read."

    def as_plan(self) -> FilePlan:
        """Return the JSON-able part that identifies the file."""
        return {
            "name": self.name,
            "bytes": self.bytes,
            "format": self.format,
            "compression": self.compression,
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Source:
    """Files that share a name and the options for turning records into documents."""

    name: str
    files: tuple[SourceFile, ...]
    options: RecordOptions
    skipped: Mapping[str, int] = field(default_factory=dict)
    "Files of a directory that were left out: kind -> number."
    notes: tuple[str, ...] = ()
    "What else a person should know of the files, such as copies among them."


class Slice(NamedTuple):
    """A part of a file: bytes, row groups (parquet), rows (arrow), tokens or documents, or lines of a streamed file."""

    file: int
    start: int
    stop: int


class Window(NamedTuple):
    """What one task reads: slices of one source."""

    source: int
    slices: tuple[Slice, ...]


def default_window_bytes(sources: Iterable[Source]) -> int:
    """Return a sixteenth of the corpus, between 16 and 256 MiB; 64 MiB where a size is unknown."""
    sizes = [weight_of(file) for source in sources for file in source.files]
    known = [size for size in sizes if size is not None]
    return 64 * MIB if len(known) < len(sizes) else min(max(sum(known) // 16, 16 * MIB), 256 * MIB)


def cut_windows(sources: list[Source], window_bytes: int | None = None) -> tuple[list[Window], int]:
    """Cut every source into windows of equal size, at most `window_bytes` where its units allow.

    Streamed files are left out (see `streams.stream_windows`). A pure function of names, sizes and metadata.

    Returns:
        The windows in plan order, and the size in bytes at which streamed files are cut.
    """
    limit = window_bytes or default_window_bytes(sources)
    windows = []
    for number, source in enumerate(sources):
        files = [(index, file) for index, file in enumerate(source.files) if not is_streamed(file)]
        total = sum(weight_of(file) or 0 for _, file in files)
        count = max(1, -(-total // limit))
        bounds = [total * index // count for index in range(count + 1)]
        of_window: list[list[Slice]] = [[] for _ in range(count)]
        begin = 0
        for index, file in files:
            for window, slice_ in _slices(index, file, source.options, begin, bounds):
                of_window[window].append(slice_)
            begin += weight_of(file) or 0
        windows += [Window(number, tuple(members)) for members in of_window if members]
    return windows, limit


def is_streamed(file: SourceFile) -> bool:
    """Whether a file cannot be cut without reading it."""
    if file.compression is not None or file.location == "-" or file.format in ("json", "csv", "tsv"):
        return True
    return file.format == "arrow" and is_url(file.location)  # the form that `datasets` writes has no index


def streamed_files(source: Source) -> list[int]:
    """Return the index of every streamed file, in plan order."""
    return [index for index, file in enumerate(source.files) if is_streamed(file)]


def enumerate_streams(sources: list[Source]) -> list[tuple[int, int]]:
    """Return (source, file) of every streamed file, in plan order."""
    return [(number, file) for number, source in enumerate(sources) for file in streamed_files(source)]


def weight_of(file: SourceFile) -> int | None:
    """Return the bytes by which a file counts: those of the columns that are read for tables, all of it for others."""
    return file.bytes if file.read_bytes is None else file.read_bytes


def _slices(
    index: int, file: SourceFile, options: RecordOptions, begin: int, bounds: list[int]
) -> Iterable[tuple[int, Slice]]:
    """Cut one file, which begins at byte `begin` of the source, at the bounds: (window, slice) pairs.

    A unit that cannot be cut (a text file, a row group) goes to the window in which it begins.
    """
    size = weight_of(file) or 0
    if file.format == "parquet":
        at = begin
        groups: dict[int, list[int]] = {}
        for group, weight in enumerate(file.units):
            groups.setdefault(min(bisect_right(bounds, at), len(bounds) - 1) - 1, []).append(group)
            at += weight
        return [(window, Slice(index, members[0], members[-1] + 1)) for window, members in groups.items()]
    if file.format == "text" and options.text_unit == "file":
        return [(bisect_right(bounds, begin) - 1, Slice(index, 0, size))] if size else []
    total = sum(file.units) if file.units else size
    slices = []
    for window in range(bisect_right(bounds, begin) - 1, len(bounds) - 1):
        if bounds[window] >= begin + size:
            break
        # Rows are placed by their share of the file's bytes; where units are bytes, this is the identity.
        start = (max(bounds[window], begin) - begin) * total // size
        stop = (min(bounds[window + 1], begin + size) - begin) * total // size
        if stop > start:
            slices.append((window, Slice(index, start, stop)))
    return slices
