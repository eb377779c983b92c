"""Which files a corpus is, and how it is cut into windows.

A SOURCE argument becomes files in a fixed order (by name), each with its size and a cheap fingerprint of its content:
both ends and fixed samples, or the etag of an object store; never a modification time. Windows are cut from order and
sizes alone, so that any worker finds its own slice; a line belongs to the slice in which its first byte lies. What
cannot be cut without reading it (`streamed`) is cut while reading, by `streams.py`. A new format is an entry in
`SUFFIXES` and a reader in `records.py`.
"""

import glob
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config import MIB, RecordOptions
from pipeline.sources.files import changed, filesystem_of, fingerprint, is_url, open_source, reaching, size_of
from pipeline.sources.hub import arrow_units, hub_files, is_lines, parquet_units, refuse_foreign, saved_files
from shards.errors import SourceError

SUFFIXES = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"},
    **{".csv": "csv", ".tsv": "tsv", ".txt": "text", ".text": "text", ".md": "text", ".rst": "text"},
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FOREIGN = (".bz2", ".xz", ".lz4", ".zip", ".7z", ".tgz", ".tar")  # what --format does not help with
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))
UNNAMED = "corpus"
NAMED = re.compile(r"([A-Za-z0-9_.-]+)=(.+)", re.DOTALL)
MAGIC_CHARACTERS = re.compile(r"[*?\[]")
HEAD_BYTES = 64 << 10


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
    "Parquet: uncompressed bytes of each row group. Arrow: number of rows of each record batch."

    def as_plan(self) -> dict[str, Any]:
        """Return the JSON-able part that identifies the file."""
        kept = ("name", "bytes", "format", "compression", "fingerprint")
        return {name: getattr(self, name) for name in kept}


@dataclass(frozen=True)
class Source:
    """Files that share a name and the options for turning records into documents."""

    name: str
    files: tuple[SourceFile, ...]
    options: RecordOptions
    skipped: Mapping[str, int] = field(default_factory=dict)
    "Files of a directory that were left out: kind -> number."


class Slice(NamedTuple):
    """A piece of a file: bytes (jsonl, text), row groups (parquet), rows (arrow), or lines of a streamed file."""

    file: int
    start: int
    stop: int


class Window(NamedTuple):
    """What one task reads: slices of one source."""

    source: int
    slices: tuple[Slice, ...]


def resolve_specs(
    specs: Iterable[str], options: RecordOptions, by_name: Mapping[str, RecordOptions] | None = None
) -> list[Source]:
    """Turn SOURCE arguments into sources, in the order in which their names first appear.

    Args:
        specs: Files, globs, directories, '-', saved datasets, hf:NAME, URLs; each may be NAME=SOURCE.
        options: How records become documents, for sources without an entry in `by_name`.
        by_name: Options by source name.

    Raises:
        SourceError: A SOURCE does not exist, holds nothing to read, or is given twice.
    """
    by_name = by_name or {}
    groups: dict[str, list[str]] = {}
    for spec in specs:
        if not spec:
            raise SourceError(
                "SOURCE: is empty; expected a file, directory, dataset or URL. Check the quoted variable."
            )
        name, rest = _split_name(spec)
        groups.setdefault(name, []).append(rest)
    if stray := sorted(set(by_name) - set(groups)):
        raise SourceError(
            f"source {stray[0]!r} has options, but no SOURCE has that name; named are {', '.join(groups)}. "
            f"Write {stray[0]}=SOURCE."
        )
    if not groups:
        raise SourceError("no SOURCE given; expected at least one file, directory or dataset.")
    return [_source(name, group, by_name.get(name, options)) for name, group in groups.items()]


def default_window_bytes(sources: Iterable[Source]) -> int:
    """Return a sixteenth of the corpus, between 16 and 256 MiB; 64 MiB where a size is unknown."""
    sizes = [_weight(file) for source in sources for file in source.files]
    known = [size for size in sizes if size is not None]
    return 64 * MIB if len(known) < len(sizes) else min(max(sum(known) // 16, 16 * MIB), 256 * MIB)


def cut_windows(sources: list[Source], window_bytes: int | None = None) -> tuple[list[Window], int]:
    """Cut every source into windows of equal size, at most `window_bytes` where its units allow.

    Streamed files are left out (see `enumerate_streams`). A pure function of names, sizes and metadata.

    Returns:
        The windows in plan order, and the size in bytes at which streamed files are cut.
    """
    limit = window_bytes or default_window_bytes(sources)
    windows = []
    for number, source in enumerate(sources):
        files = [(index, file) for index, file in enumerate(source.files) if not is_streamed(file, source.options)]
        total = sum(_weight(file) or 0 for _, file in files)
        count = max(1, -(-total // limit))
        bounds = [total * index // count for index in range(count + 1)]
        slices: list[list[Slice]] = [[] for _ in range(count)]
        begin = 0
        for index, file in files:
            for window, piece in _pieces(index, file, source.options, begin, bounds):
                slices[window].append(piece)
            begin += _weight(file) or 0
        windows += [Window(number, tuple(pieces)) for pieces in slices if pieces]
    return windows, limit


def is_streamed(file: SourceFile, options: RecordOptions) -> bool:  # noqa: ARG001
    """Whether a file cannot be cut without reading it."""
    if file.compression is not None or file.location == "-" or file.format in ("json", "csv", "tsv"):
        return True
    return file.format == "arrow" and is_url(file.location)  # the form that `datasets` writes has no index


def enumerate_streams(sources: list[Source]) -> list[tuple[int, int]]:
    """Return (source, file) of every streamed file, in plan order."""
    return [
        (number, index)
        for number, source in enumerate(sources)
        for index, file in enumerate(source.files)
        if is_streamed(file, source.options)
    ]


def check_unchanged(sources: Iterable[Source]) -> None:
    """Compare every file with its fingerprint, to notice a corpus that changed while it was read.

    Raises:
        SourceError: A file is gone or holds something else.
    """
    for source in sources:
        for file in source.files:
            if file.location != "-" and (size_of(file.location), fingerprint(file.location)) != (
                file.bytes,
                file.fingerprint,
            ):
                raise changed(file.name)


def _split_name(spec: str) -> tuple[str, str]:
    named = NAMED.fullmatch(spec)
    if named is None or os.path.exists(spec) or (MAGIC_CHARACTERS.search(spec) and glob.glob(spec)):
        return UNNAMED, os.path.expanduser(spec)  # a path may hold '=', as Hive partitions do
    return named[1], os.path.expanduser(named[2])  # no shell expands a ~ behind an equals sign


def _source(name: str, specs: list[str], options: RecordOptions) -> Source:
    skipped: dict[str, int] = {}
    found: dict[str, SourceFile] = {}
    for spec in specs:
        for file in _expand(spec, options, skipped):
            if file.location in found:
                raise SourceError(f"{spec}: {file.name} is given twice for source {name!r}; expected once. Omit one.")
            found[file.location] = file
    filled = [file for file in found.values() if file.bytes != 0]
    if len(filled) < len(found):
        skipped["empty"] = len(found) - len(filled)
    if not filled:
        what = f"{next(iter(found.values())).name}: empty file" if found else f"{specs[0]}: no files to read"
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(skipped.items()))
        left = f" ({kinds} left out)" if kinds and len(found) != 1 else ""
        raise SourceError(f"{what}{left}; expected at least one record. Check the SOURCE.")
    files = tuple(sorted(_distinct(filled), key=lambda file: (file.name, file.location)))
    return Source(name, files, options, skipped)


def _distinct(files: list[SourceFile]) -> list[SourceFile]:
    """Lengthen names that several SOURCE arguments gave, by as much of the path as tells them apart."""
    by_name: dict[str, list[SourceFile]] = {}
    for file in files:
        by_name.setdefault(file.name, []).append(file)
    renamed = []
    for group in by_name.values():
        if len(group) > 1:
            common = len(os.path.commonpath([file.location for file in group])) + 1
            group = [replace(file, name=file.location[common:].replace(os.sep, "/")) for file in group]
        renamed += group
    return renamed


def _expand(spec: str, options: RecordOptions, skipped: dict[str, int]) -> list[SourceFile]:
    """Return the files of one SOURCE argument."""
    if spec == "-":
        return [SourceFile("stdin", "-", None, options.format or "jsonl", None, "")]
    if spec.startswith("hf:"):
        return [_file(name, location, "arrow") for name, location in hub_files(spec)]
    if is_url(spec):
        return _expand_url(spec, options, skipped)
    if MAGIC_CHARACTERS.search(spec) and not os.path.exists(spec):
        root, matches = _above(spec) or ".", glob.glob(spec, recursive=True)
        directories = [] if "**" in spec else [path for path in matches if os.path.isdir(path)]
        others = [path for path in matches if os.path.exists(path) and not os.path.isdir(path)]
        files = [_local(path, os.path.relpath(path, root), options) for path in others]
        return files + [file for path in directories for file in _expand_directory(path, root, options, skipped)]
    if os.path.isdir(spec):
        return _expand_directory(spec, spec, options, skipped)
    if not os.path.exists(spec):
        name = spec.partition("=")[0] if "=" in spec else "/"
        hint = "" if "/" in name else " A name before = takes letters, digits, _, . and - alone."
        raise SourceError(f"{spec}: no such file or directory; expected a SOURCE. Check the path.{hint}")
    return [_local(spec, os.path.basename(spec), options)]


def _above(pattern: str) -> str:
    """Return the directory above the first wildcard of a glob."""
    return os.path.dirname(MAGIC_CHARACTERS.split(pattern, maxsplit=1)[0])


def _expand_directory(path: str, root: str, options: RecordOptions, skipped: dict[str, int]) -> list[SourceFile]:
    """Return what a directory holds: a saved dataset, or the files of known formats below it."""
    saved = saved_files(path)
    if saved is not None:
        return [_file(os.path.relpath(location, root), location, "arrow") for location in saved]
    found = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]
    return _choose([(location, os.path.relpath(location, root)) for location in found], options, skipped)


def _expand_url(spec: str, options: RecordOptions, skipped: dict[str, int]) -> list[SourceFile]:
    filesystem, path = filesystem_of(spec)
    with reaching(spec):
        if MAGIC_CHARACTERS.search(path):
            root, paths = _above(path), filesystem.glob(path)
        elif filesystem.isfile(path):
            root, paths = os.path.dirname(path), [path]
        else:
            root, paths = path, filesystem.find(path)
    if not paths:
        raise SourceError(f"{spec}: nothing there; expected a file or folder. Check the URL and the credentials.")
    names = [path[len(root) :].lstrip("/") or os.path.basename(path) for path in paths]
    found = list(zip(map(filesystem.unstrip_protocol, paths), names, strict=True))
    return [_local(*found[0], options)] if len(found) == 1 else _choose(found, options, skipped)


def _choose(found: list[tuple[str, str]], options: RecordOptions, skipped: dict[str, int]) -> list[SourceFile]:
    """Return the files of known formats among (location, name), and count the others in `skipped`.

    Text files count only where there are no others: a README beside Parquet files is no document.
    """
    kinds = [_format_of(location, options)[0] for location, _ in found]
    structured = options.format is None and any(kind not in (None, "text") for kind in kinds)
    files = []
    for (location, name), kind in zip(found, kinds, strict=True):
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if hidden or kind is None or (kind == "text" and structured):
            reason = "hidden" if hidden else Path(name).suffix or "without suffix"
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            files.append(_local(location, name, options))
    return files


def _format_of(name: str, options: RecordOptions) -> tuple[str | None, str | None]:
    """Return format and compression by the name's endings."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression is not None:
        suffix = os.path.splitext(stem)[1]
    return options.format or SUFFIXES.get(suffix), compression


def _local(location: str, name: str, options: RecordOptions) -> SourceFile:
    if not is_url(location) and os.path.exists(location) and not os.path.isfile(location):
        what = "a pipe" if stat.S_ISFIFO(os.stat(location).st_mode) else "no regular file"
        raise SourceError(
            f"{location}: is {what}; expected a file that can be read more than once. Use - and redirect it to stdin."
        )
    kind, compression = _format_of(location, options)
    if kind is None:
        raise SourceError(
            f"{name}: cannot tell the format from its name; expected {', '.join(SUFFIXES)}, or those with .gz or .zst. "
            + ("Decompress it, or compress it with gzip or zstd." if Path(name).suffix in FOREIGN else "Give --format.")
        )
    if kind not in FORMATS:
        raise SourceError(f"--format: {kind!r}; expected one of {', '.join(FORMATS)}.")
    return _file(name, location, kind, compression)


def _file(name: str, location: str, kind: str, compression: str | None = None) -> SourceFile:
    """Look at one file: size, fingerprint, encoding, and the units in which it can be cut."""
    location = location if is_url(location) else os.path.abspath(location)
    name = name.replace(os.sep, "/")
    size = size_of(location)
    if size and compression is None and kind in ("jsonl", "json", "csv", "tsv", "text"):
        with open_source(location) as stream:
            head = stream.read(HEAD_BYTES)
        refuse_foreign(head, name)
        if kind == "json" and is_lines(head):
            kind = "jsonl"  # so named on the hub, and it can be cut
    units: tuple[int, ...] = ()
    if size and compression is None and kind in ("parquet", "arrow"):
        units = parquet_units(location, name) if kind == "parquet" else arrow_units(location, name)
    return SourceFile(name, location, size, kind, compression, fingerprint(location), units)


def _weight(file: SourceFile) -> int | None:
    """Return the bytes by which a file counts: uncompressed ones for Parquet."""
    return sum(file.units) if file.format == "parquet" else file.bytes


def _pieces(
    index: int, file: SourceFile, options: RecordOptions, begin: int, bounds: list[int]
) -> Iterable[tuple[int, Slice]]:
    """Cut one file, which begins at byte `begin` of the source, at the bounds: (window, slice) pairs.

    A unit that cannot be cut (a text file, a row group) goes to the window in which it begins.
    """
    size = _weight(file) or 0
    if file.format == "parquet":
        at = begin
        groups: dict[int, list[int]] = {}
        for group, weight in enumerate(file.units):
            groups.setdefault(min(bisect_right(bounds, at), len(bounds) - 1) - 1, []).append(group)
            at += weight
        return [(window, Slice(index, members[0], members[-1] + 1)) for window, members in groups.items()]
    if file.format == "text" and options.text_unit == "file":
        return [(bisect_right(bounds, begin) - 1, Slice(index, 0, size))] if size else []
    total = sum(file.units) if file.format == "arrow" else size
    pieces = []
    for window in range(bisect_right(bounds, begin) - 1, len(bounds) - 1):
        if bounds[window] >= begin + size:
            break
        # Rows are placed by their share of the file's bytes; where units are bytes, this is the identity.
        start = (max(bounds[window], begin) - begin) * total // size
        stop = (min(bounds[window + 1], begin + size) - begin) * total // size
        if stop > start:
            pieces.append((window, Slice(index, start, stop)))
    return pieces
