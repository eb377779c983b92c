"""Local files below a directory or behind a glob, found the same way by both.

Links are followed, each directory is entered once (so that a link to a parent is no endless corpus), and a directory
that cannot be listed is an error that names it. What must not be read as a corpus is passed over and counted: the
output of the build, and datasets that a build wrote. Of folders that `datasets` saved only the Arrow files count.
"""

import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import orjson

from pipeline.sources.hub import saved_files
from shards.errors import SourceError
from shards.fetching.remote import reaching
from shards.plan import FORMAT

MAGIC = "*?["
LINKED, OUTPUT, PACKED = "linked again", "of the output directory", "of packed datasets"  # kinds that are left out


def has_magic(path: str) -> bool:
    """Whether a path is a glob."""
    return any(character in path for character in MAGIC)


def glob_root(pattern: str) -> str:
    """Return the directory above the first wildcard of a glob."""
    first = min(pattern.index(character) for character in MAGIC if character in pattern)
    return os.path.dirname(pattern[:first])


class Walk:
    """The files of one SOURCE argument.

    Args:
        exclude: Directories that are never entered; they need not exist.
        count: Called with the kind of each directory that is left out.
    """

    def __init__(self, exclude: frozenset[str], count: Callable[[str], None]) -> None:
        self._exclude = exclude
        self._count = count
        self._entered: set[tuple[int, int]] = set()

    def below(self, directory: str) -> Iterator[str]:
        """Yield the files below a directory, in the order of their names.

        Raises:
            SourceError: A directory cannot be listed.
        """
        if not self._enter(directory):
            return
        saved = saved_files(directory)
        if saved is not None:
            yield from saved
            return
        for entry in self._entries(directory):
            if self._is_directory(entry):
                yield from self.below(entry.path)
            else:
                yield entry.path

    def matching(self, pattern: str) -> list[str]:
        """Return the files and directories that a glob matches; `**` stands for directories at any depth, or none.

        Raises:
            SourceError: A directory cannot be listed.
        """
        root = "/" if pattern.startswith("/") else ""
        return list(dict.fromkeys(self._match(root, pattern.strip("/").split("/"))))

    def _match(self, base: str, parts: list[str]) -> Iterator[str]:
        head, *rest = parts
        if head == "**":
            yield from self._match_any_depth(base, rest or ["*"])
        elif not has_magic(head):
            path = os.path.join(base, head)
            if rest and os.path.isdir(path):
                yield from self._match(path, rest)
            elif not rest and os.path.lexists(path):
                yield path
        else:
            for entry in self._entries(base):
                hidden = entry.name.startswith(".") and not head.startswith(".")
                if hidden or not fnmatchcase(entry.name, head):
                    continue
                if not rest:
                    yield entry.path
                elif self._is_directory(entry) and not self._left_out(entry.path):
                    yield from self._match(entry.path, rest)

    def _match_any_depth(self, base: str, rest: list[str]) -> Iterator[str]:
        if not self._enter(base):
            return
        yield from self._match(base, rest)
        for entry in self._entries(base):
            if not entry.name.startswith(".") and self._is_directory(entry):
                yield from self._match_any_depth(entry.path, rest)

    def _enter(self, directory: str) -> bool:
        """Whether to look into a directory, which is then entered."""
        if self._left_out(directory):
            return False
        with reaching(directory):
            status = os.stat(directory or ".")
        identity = (status.st_dev, status.st_ino)
        if identity in self._entered:
            self._count(LINKED)
            return False
        self._entered.add(identity)
        return True

    def _left_out(self, directory: str) -> bool:
        if self._exclude and os.path.realpath(directory) in self._exclude:
            self._count(OUTPUT)
        elif is_packed_dataset(directory):
            self._count(PACKED)
        else:
            return False
        return True

    def _entries(self, directory: str) -> list["os.DirEntry[str]"]:
        with reaching(directory or "."), os.scandir(directory or ".") as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        if directory:
            return found
        return [_Bare(entry) for entry in found]  # type: ignore[misc]

    def _is_directory(self, entry: "os.DirEntry[str]") -> bool:
        with reaching(entry.path):
            return entry.is_dir()


class _Bare:
    """An entry of the working directory, whose path does not begin with './'."""

    def __init__(self, entry: "os.DirEntry[str]") -> None:
        self.name = self.path = entry.name
        self.is_dir = entry.is_dir


def is_packed_dataset(directory: str) -> bool:
    """Whether a directory holds a dataset that a build wrote, or is writing."""
    try:
        with open(os.path.join(directory, "plan.json"), "rb") as stream:
            plan: Any = orjson.loads(stream.read())
    except (OSError, orjson.JSONDecodeError):
        return False
    return isinstance(plan, dict) and plan.get("format") == FORMAT


def refuse_own(directory: str, exclude: frozenset[str]) -> None:
    """Refuse a SOURCE that is what the build writes, or what another one wrote.

    Raises:
        SourceError: It is one of these.
    """
    if os.path.realpath(directory) in exclude:
        raise SourceError(
            f"{directory}: is the output of this build; expected a corpus. Choose another SOURCE or `out`."
        )
    if is_packed_dataset(directory):
        raise SourceError(
            f"{directory}: is a packed dataset; expected a corpus. Name the files that it was built from."
        )
