"""Which files a corpus is.

A SOURCE argument becomes files in a fixed order (by name), each with its size and a cheap fingerprint of its content:
both ends and fixed samples, or the etag of an object store; never a modification time. A new format is an entry in
`SUFFIXES`, and a way to cut it (`windows.py`) and to read it (`reader.py`).
"""

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.config import RecordOptions
from pipeline.sources.files import changed, fingerprint, is_lines, open_source, refuse_foreign, size_of
from pipeline.sources.hub import hub_files
from pipeline.sources.local import LINKED, OUTPUT, PACKED, Walk, glob_root, has_magic, refuse_own
from pipeline.sources.tables import arrow_units, parquet_units
from pipeline.sources.token_files import is_megatron, open_tokens
from pipeline.sources.windows import Source, SourceFile
from shards.errors import SourceError
from shards.fetching.remote import filesystem_of, hide_secrets, is_url, reaching
from shards.plan import SOURCE_NAME

SUFFIXES = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"},
    **{".csv": "csv", ".tsv": "tsv", ".txt": "text", ".text": "text", ".md": "text", ".rst": "text"},
}
TOKEN_SUFFIXES = {".npy": "npy", ".bin": "bin"}  # where records are token ids; a .bin may have an .idx beside it
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FOREIGN = (".bz2", ".xz", ".lz4", ".zip", ".7z", ".tgz", ".tar")  # what --format does not help with
FORMATS = tuple(dict.fromkeys([*SUFFIXES.values(), *TOKEN_SUFFIXES.values()]))
UNNAMED = "corpus"
NAMED = re.compile(f"({SOURCE_NAME})=(.+)", re.DOTALL)
HEAD_BYTES = 64 << 10


def resolve_sources(
    arguments: Iterable[str],
    options: RecordOptions,
    by_name: Mapping[str, RecordOptions] | None = None,
    *,
    exclude: Iterable[str] = (),
) -> list[Source]:
    """Turn SOURCE arguments into sources, in the order in which their names first appear.

    Args:
        arguments: Files, globs, directories, '-', saved datasets, hf:NAME, URLs; each may be NAME=SOURCE.
        options: How records become documents, for sources without an entry in `by_name`.
        by_name: Options by source name.
        exclude: Directories or URLs that are no part of any source, such as the output of the build.

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
    finder = _Finder(frozenset(place if is_url(place) else os.path.realpath(place) for place in exclude))
    sources = [finder.source(name, group, by_name.get(name, options)) for name, group in groups.items()]
    return _with_copies_named(sources)


def check_unchanged(sources: Iterable[Source]) -> None:
    """Compare every file with its fingerprint, to notice a corpus that changed while it was read.

    Raises:
        SourceError: A file is gone or holds something else.
    """
    for source in sources:
        for file in source.files:
            if file.location != "-" and (size_of(file.location), identity(file.location, file.format)) != (
                file.bytes,
                file.fingerprint,
            ):
                raise changed(file.name)


def identity(location: str, kind: str) -> str:
    """Return the fingerprint of a file; where an index belongs to it, of both."""
    index = f"{os.path.splitext(location)[0]}.idx"
    return "+".join(map(fingerprint, (location, index) if kind == "megatron" else (location,)))


def _split_name(argument: str) -> tuple[str, str]:
    named = NAMED.fullmatch(argument)
    if named is None or os.path.exists(argument) or (has_magic(argument) and glob.glob(argument)):
        return UNNAMED, os.path.expanduser(argument)  # a path may hold '=', as Hive partitions do
    return named[1], os.path.expanduser(named[2])  # no shell expands a ~ behind an equals sign


def _with_copies_named(sources: list[Source]) -> list[Source]:
    """Note in each source which of its files hold the same bytes as another one."""
    first: dict[str, str] = {}
    noted = []
    for source in sources:
        copies = []
        for file in source.files:
            original = first.setdefault(file.fingerprint, file.name) if file.fingerprint else file.name
            if original != file.name:
                copies.append(f"{file.name} like {original}")
        if copies:
            more = f" and {len(copies) - 3:,} more" if len(copies) > 3 else ""
            note = f"files that hold the same bytes as another: {', '.join(copies[:3])}{more}"
            source = replace(source, notes=(note,))
        noted.append(source)
    return noted


class _Finder:
    """Finds the files of sources, and counts what is left out."""

    def __init__(self, exclude: frozenset[str]) -> None:
        self._exclude = exclude
        self._skipped: dict[str, int] = {}

    def source(self, name: str, arguments: list[str], options: RecordOptions) -> Source:
        self._skipped = {}
        found: dict[str, SourceFile] = {}
        for argument in arguments:
            for file in self._expand(argument, options):
                if file.location in found:
                    shown = hide_secrets(argument)
                    raise SourceError(
                        f"{shown}: {file.name} is given twice for source {name!r}; expected once. Omit one."
                    )
                found[file.location] = file
        filled = [file for file in found.values() if file.bytes != 0]
        if len(filled) < len(found):
            self._skipped["empty"] = len(found) - len(filled)
        if not filled:
            what = f"{next(iter(found.values())).name}: empty file" if found else f"{arguments[0]}: no files to read"
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(self._skipped.items()))
            left = f" ({kinds} left out)" if kinds and len(found) != 1 else ""
            raise SourceError(f"{hide_secrets(what)}{left}; expected at least one record. Check the SOURCE.")
        files = self._once(sorted(_distinct(filled), key=lambda file: (file.name, file.location)))
        return Source(name, tuple(files), options, self._skipped)

    def _once(self, files: list[SourceFile]) -> Iterator[SourceFile]:
        """Yield each local file once, whatever links lead to it: the first of its names."""
        seen: set[tuple[int, int]] = set()
        for file in files:
            if not is_url(file.location) and file.location != "-":
                status = os.stat(file.location)
                if (status.st_dev, status.st_ino) in seen:
                    self._count(LINKED)
                    continue
                seen.add((status.st_dev, status.st_ino))
            yield file

    def _count(self, kind: str) -> None:
        self._skipped[kind] = self._skipped.get(kind, 0) + 1

    def _expand(self, argument: str, options: RecordOptions) -> list[SourceFile]:
        """Return the files of one SOURCE argument."""
        if argument == "-":
            return [SourceFile("stdin", "-", None, options.format or "jsonl", None, "")]
        if argument.startswith("hf:"):
            return [_file(name, location, options, "arrow") for name, location in hub_files(argument)]
        if is_url(argument):
            return self._expand_url(argument, options)
        walk = Walk(self._exclude, self._count)
        if has_magic(argument) and not os.path.exists(argument):
            root, matches = glob_root(argument) or ".", walk.matching(argument)
            directories = [] if "**" in argument else [path for path in matches if os.path.isdir(path)]
            files = [_local(path, os.path.relpath(path, root), options) for path in matches if not os.path.isdir(path)]
            return files + [file for path in directories for file in self._expand_directory(walk, path, root, options)]
        if os.path.isdir(argument):
            refuse_own(argument, self._exclude)
            return self._expand_directory(walk, argument, argument, options)
        if not os.path.lexists(argument):
            name, equals, path = argument.partition("=")
            meant = bool(equals) and ("/" not in name or os.path.lexists(os.path.expanduser(path)))
            hint = " A name before = takes letters, digits, _, . and - alone." if meant else ""
            raise SourceError(f"{argument}: no such file or directory; expected a SOURCE. Check the path.{hint}")
        return [_local(argument, os.path.basename(argument), options)]

    def _expand_directory(self, walk: Walk, path: str, root: str, options: RecordOptions) -> list[SourceFile]:
        """Return the files of known formats below a directory."""
        return self._choose([(file, os.path.relpath(file, root)) for file in walk.below(path)], options)

    def _expand_url(self, argument: str, options: RecordOptions) -> list[SourceFile]:
        filesystem, path = filesystem_of(argument)
        with reaching(argument):
            if has_magic(path):
                root, paths = glob_root(path), filesystem.glob(path)
            elif filesystem.isfile(path):
                root, paths = os.path.dirname(hide_secrets(path)), [path]
            else:
                root, paths = hide_secrets(path), filesystem.find(path)
        if not paths:
            where = hide_secrets(argument)
            raise SourceError(f"{where}: nothing there; expected a file or folder. Check the URL and the credentials.")
        shown = [hide_secrets(path) for path in paths]  # names are stored in the plan
        names = [path[len(root) :].lstrip("/") or os.path.basename(path) for path in shown]
        found = list(zip(map(filesystem.unstrip_protocol, paths), names, strict=True))
        if len(found) == 1:
            return [_local(*found[0], options)]
        return self._choose(self._without_own(found), options)

    def _without_own(self, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Leave out what lies below the output, or in a dataset that a build wrote; objects have no links."""
        names = {name for _, name in found}
        packed = [name.removesuffix("plan.json") for name in names if name.rpartition("/")[2] == "plan.json"]
        packed = [folder for folder in packed if f"{folder}manifest.json" in names]
        kept = []
        for location, name in found:
            if any(location.startswith(f"{place.rstrip('/')}/") for place in self._exclude if is_url(place)):
                self._count(OUTPUT)
            elif any(name.startswith(folder) for folder in packed):
                self._count(PACKED)
            else:
                kept.append((location, name))
        return kept

    def _choose(self, found: list[tuple[str, str]], options: RecordOptions) -> list[SourceFile]:
        """Return the files of known formats among (location, name), and count the others.

        Text files count only where there are no others: a README beside Parquet files is no document.
        """
        kinds = [_format_of(name, options)[0] for _, name in found]
        structured = options.format is None and any(kind not in (None, "text") for kind in kinds)
        files = []
        for (location, name), kind in zip(found, kinds, strict=True):
            hidden = any(part.startswith(".") and part != ".." for part in Path(name).parts)
            if hidden or kind is None or (kind == "text" and structured):
                self._count("hidden" if hidden else Path(name).suffix or "without suffix")
            else:
                files.append(_local(location, name, options))
        return files


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


def _format_of(name: str, options: RecordOptions) -> tuple[str | None, str | None]:
    """Return format and compression by the name's endings."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression is not None:
        suffix = os.path.splitext(stem)[1]
    suffixes = SUFFIXES | TOKEN_SUFFIXES if options.kind == "tokens" else SUFFIXES
    return options.format or suffixes.get(suffix), compression


def _local(location: str, name: str, options: RecordOptions) -> SourceFile:
    if os.path.islink(location) and not os.path.exists(location):
        raise SourceError(
            f"{location}: is a link to {os.readlink(location)!r}, which is not there; expected a file. "
            "Restore what it points to, or remove it."
        )
    if not is_url(location) and os.path.exists(location) and not os.path.isfile(location):
        what = "a pipe" if stat.S_ISFIFO(os.stat(location).st_mode) else "no regular file"
        raise SourceError(
            f"{location}: is {what}; expected a file that can be read more than once. Use - and redirect it to stdin."
        )
    kind, compression = _format_of(name, options)
    if kind is None:
        raise SourceError(
            f"{name}: cannot tell the format from its name; expected {', '.join(SUFFIXES)}, or those with .gz or .zst. "
            + ("Decompress it, or compress it with gzip or zstd." if Path(name).suffix in FOREIGN else "Give `format`.")
        )
    if kind not in FORMATS:
        raise SourceError(f"`format`: {kind!r}; expected one of {', '.join(FORMATS)}.")
    return _file(name, location, options, kind, compression)


def _file(name: str, location: str, options: RecordOptions, kind: str, compression: str | None = None) -> SourceFile:
    """Look at one file: size, fingerprint, encoding, and the units in which it can be cut."""
    location = location if is_url(location) else os.path.abspath(location)
    name = name.replace(os.sep, "/")
    size = size_of(location)
    if size and compression is None and kind in ("jsonl", "json", "csv", "tsv", "text"):
        with open_source(location) as stream:
            head = stream.read(HEAD_BYTES)
        if not (kind == "text" and options.text_unit == "file"):  # there, a file is a record, and bad ones are counted
            refuse_foreign(head, name)
        if kind == "json" and is_lines(head):
            kind = "jsonl"  # so named on the hub, and it can be cut
    units, read_bytes = tuple[int, ...](), None
    if size and compression is None and kind == "parquet":
        units, read_bytes = parquet_units(location, name, options)
    elif size and compression is None and kind == "arrow" and not is_url(location):
        units, read_bytes = arrow_units(location, name, options)
    elif size and kind in TOKEN_SUFFIXES.values():
        if options.kind != "tokens" or compression is not None:
            raise SourceError(f"{name}: holds token ids; expected `ids_field` or `eos_id`, and no compression.")
        kind = "megatron" if kind == "bin" and is_megatron(location) else kind
        tokens = open_tokens(location, name, kind, options)
        units = (len(tokens.ids) if tokens.documents is None else len(tokens.documents) - 1,)
    return SourceFile(name, location, size, kind, compression, identity(location, kind), units, read_bytes)
