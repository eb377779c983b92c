"""Which files a corpus is.

A SOURCE argument becomes files in a fixed order (by name), each with its size and a cheap fingerprint of its content:
both ends and fixed samples, or the etag of an object store; never a modification time. A new format is an entry in
`SUFFIXES`, and a way to cut it (`windows.py`) and to read it (`reader.py`).
"""

import glob
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.config import RecordOptions
from pipeline.sources.files import (
    changed,
    filesystem_of,
    fingerprint,
    is_lines,
    is_url,
    open_source,
    reaching,
    refuse_foreign,
    size_of,
)
from pipeline.sources.hub import hub_files, saved_files
from pipeline.sources.tables import arrow_units, parquet_units
from pipeline.sources.windows import Source, SourceFile
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


def resolve_sources(
    arguments: Iterable[str], options: RecordOptions, by_name: Mapping[str, RecordOptions] | None = None
) -> list[Source]:
    """Turn SOURCE arguments into sources, in the order in which their names first appear.

    Args:
        arguments: Files, globs, directories, '-', saved datasets, hf:NAME, URLs; each may be NAME=SOURCE.
        options: How records become documents, for sources without an entry in `by_name`.
        by_name: Options by source name.

    Raises:
        SourceError: A SOURCE does not exist, holds nothing to read, or is given twice.
    """
    by_name = by_name or {}
    groups: dict[str, list[str]] = {}
    for argument in arguments:
        if not argument:
            raise SourceError(
                "SOURCE is an empty string; expected a file, directory, dataset or URL. Is a shell variable unset?"
            )
        name, rest = _split_name(argument)
        groups.setdefault(name, []).append(rest)
    if stray := sorted(set(by_name) - set(groups)):
        raise SourceError(
            f"source {stray[0]!r} has options, but no SOURCE has that name; named are {', '.join(groups)}. "
            f"Write {stray[0]}=SOURCE."
        )
    if not groups:
        raise SourceError("no SOURCE given; expected at least one file, directory or dataset.")
    return [_source(name, group, by_name.get(name, options)) for name, group in groups.items()]


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


def _split_name(argument: str) -> tuple[str, str]:
    named = NAMED.fullmatch(argument)
    if named is None or os.path.exists(argument) or (MAGIC_CHARACTERS.search(argument) and glob.glob(argument)):
        return UNNAMED, os.path.expanduser(argument)  # a path may hold '=', as Hive partitions do
    return named[1], os.path.expanduser(named[2])  # no shell expands a ~ behind an equals sign


def _source(name: str, arguments: list[str], options: RecordOptions) -> Source:
    skipped: dict[str, int] = {}
    found: dict[str, SourceFile] = {}
    for argument in arguments:
        for file in _expand(argument, options, skipped):
            if file.location in found:
                raise SourceError(
                    f"{argument}: {file.name} is given twice for source {name!r}; expected once. Omit one."
                )
            found[file.location] = file
    filled = [file for file in found.values() if file.bytes != 0]
    if len(filled) < len(found):
        skipped["empty"] = len(found) - len(filled)
    if not filled:
        what = f"{next(iter(found.values())).name}: empty file" if found else f"{arguments[0]}: no files to read"
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


def _expand(argument: str, options: RecordOptions, skipped: dict[str, int]) -> list[SourceFile]:
    """Return the files of one SOURCE argument."""
    if argument == "-":
        return [SourceFile("stdin", "-", None, options.format or "jsonl", None, "")]
    if argument.startswith("hf:"):
        return [_file(name, location, options, "arrow") for name, location in hub_files(argument)]
    if is_url(argument):
        return _expand_url(argument, options, skipped)
    if MAGIC_CHARACTERS.search(argument) and not os.path.exists(argument):
        root, matches = _glob_root(argument) or ".", glob.glob(argument, recursive=True)
        directories = [] if "**" in argument else [path for path in matches if os.path.isdir(path)]
        others = [path for path in matches if os.path.exists(path) and not os.path.isdir(path)]
        files = [_local(path, os.path.relpath(path, root), options) for path in others]
        return files + [file for path in directories for file in _expand_directory(path, root, options, skipped)]
    if os.path.isdir(argument):
        return _expand_directory(argument, argument, options, skipped)
    if not os.path.exists(argument):
        name = argument.partition("=")[0] if "=" in argument else "/"
        hint = "" if "/" in name else " A name before = takes letters, digits, _, . and - alone."
        raise SourceError(f"{argument}: no such file or directory; expected a SOURCE. Check the path.{hint}")
    return [_local(argument, os.path.basename(argument), options)]


def _glob_root(pattern: str) -> str:
    """Return the directory above the first wildcard of a glob."""
    return os.path.dirname(MAGIC_CHARACTERS.split(pattern, maxsplit=1)[0])


def _expand_directory(path: str, root: str, options: RecordOptions, skipped: dict[str, int]) -> list[SourceFile]:
    """Return what a directory holds: a saved dataset, or the files of known formats below it."""
    saved = saved_files(path)
    if saved is not None:
        return [_file(os.path.relpath(location, root), location, options, "arrow") for location in saved]
    found = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]
    return _choose([(location, os.path.relpath(location, root)) for location in found], options, skipped)


def _expand_url(argument: str, options: RecordOptions, skipped: dict[str, int]) -> list[SourceFile]:
    filesystem, path = filesystem_of(argument)
    with reaching(argument):
        if MAGIC_CHARACTERS.search(path):
            root, paths = _glob_root(path), filesystem.glob(path)
        elif filesystem.isfile(path):
            root, paths = os.path.dirname(path), [path]
        else:
            root, paths = path, filesystem.find(path)
    if not paths:
        raise SourceError(f"{argument}: nothing there; expected a file or folder. Check the URL and the credentials.")
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
    return _file(name, location, options, kind, compression)


def _file(name: str, location: str, options: RecordOptions, kind: str, compression: str | None = None) -> SourceFile:
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
    units, read_bytes = tuple[int, ...](), None
    if size and compression is None and kind == "parquet":
        units, read_bytes = parquet_units(location, name, options)
    elif size and compression is None and kind == "arrow" and not is_url(location):
        units, read_bytes = arrow_units(location, name, options)
    return SourceFile(name, location, size, kind, compression, fingerprint(location), units, read_bytes)
