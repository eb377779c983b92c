"""Make files appear whole or not at all.

All that a dataset holds is written under `_tmp/`, flushed, fsynced, renamed, and its directory fsynced, in that order;
what a crash leaves behind is only ever an unread file in `_tmp/`. `Store` is the interface a build writes through; an
object store (see `shards/fetching/remote.py`) has the same methods, since a finished upload is already atomic there.
All system calls go through `write`, `fsync` and `rename` below, so that tests can make any of them fail.
"""

import errno
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash

from shards.errors import FormatError, PackError

TMP = "_tmp"
SCRATCH = re.compile(r".+-\d+-[0-9a-f]+")  # what `LocalStore.scratch` names files
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
STALE_S = 24 * 3600.0  # an unpublished file this old belongs to a build that died


def write(file: IO[bytes], data: bytes | memoryview) -> int:
    """Write all of `data`: a raw file may take less at a time, above all when the disk is nearly full."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += file.write(view[done:])
    return done


def fsync(file: IO[bytes]) -> None:
    """Flush `file` down to the disk."""
    file.flush()
    os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Move `source` onto `target` and make the move itself durable."""
    source.replace(target)
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    """Make what was created, renamed or removed inside `path` durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Store(Protocol):
    """Where a build publishes to."""

    location: str

    def scratch(self, name: str) -> Path:
        """Return a fresh local path for unpublished work."""

    def publish(self, scratch: Path, name: str) -> None:
        """Make a finished, fsynced scratch file visible as `name`."""

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """Publish `data` as `name`."""

    def get(self, name: str) -> bytes | None:
        """Return what `name` holds, or None where there is no such file."""

    def sizes(self, directory: str) -> dict[str, int]:
        """Return bytes by name for what lies directly inside `directory`; "" is the root."""

    def size(self, name: str) -> int | None:
        """Return the bytes of one file; None where there is none."""

    def create(self) -> None:
        """Make the place ready to be written to."""

    def put_new(self, name: str, data: bytes) -> bool:
        """Publish `data` as `name` unless there is such a file; return whether it was written."""

    def sweep(self, *, everything: bool = False) -> None:
        """Remove unpublished work that is stale, or all of it."""

    def remove(self, name: str) -> None:
        """Remove one file."""

    def prune(self) -> None:
        """Remove the directories of a dataset that are empty, and its own if this store made it."""


class LocalStore:
    """A dataset directory on a file system."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.location = str(root)
        self.made_root = False

    def create(self) -> None:
        """Make the directories of a dataset.

        Raises:
            PackError: The place cannot be written to, or its directories are links to others.
        """
        try:
            self._make_root()
            for directory in (self.root / "shards", self.root / "tokenizer", self.root / TMP):
                if directory.is_symlink():
                    raise PackError(
                        f"{directory}: is a link; expected a directory, since what is written and removed in a dataset "
                        "stays inside it. Remove the link, or choose another directory."
                    )
                directory.mkdir(parents=True, exist_ok=True)
            probe = self.scratch("probe")
            probe.touch()
            probe.unlink()
            sync_directory(self.root)
            sync_directory(self.root.parent)
        except OSError as error:
            raise PackError(
                f"{self.root}: cannot be written ({error.strerror}); expected a writable output directory. "
                "Choose another directory or fix its permissions."
            ) from error

    def scratch(self, name: str) -> Path:
        """Return a path in `_tmp/` that no other process uses."""
        unique = f"{name}-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns():x}"
        (self.root / TMP).mkdir(exist_ok=True)
        return self.root / TMP / unique

    def publish(self, scratch: Path, name: str) -> None:
        """Rename a finished, fsynced scratch file to its final name."""
        target = self.root / name
        target.parent.mkdir(exist_ok=True)
        rename(scratch, target)

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """Publish `data` as `name`: written aside, fsynced, renamed."""
        if if_absent and (self.root / name).exists():
            raise PackError(
                f"{self.root / name}: is there already; another build finished first. Run pack verify on it."
            )
        scratch = self.scratch(Path(name).name)
        try:
            with scratch.open("wb") as file:
                write(file, data)
                fsync(file)
            self.publish(scratch, name)
        finally:
            scratch.unlink(missing_ok=True)

    def get(self, name: str) -> bytes | None:
        """Read a whole file; None where there is none."""
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def sizes(self, directory: str) -> dict[str, int]:
        """Return bytes by file name; empty where there is no such directory."""
        try:
            return {entry.name: entry.stat().st_size for entry in os.scandir(self.root / directory)}
        except FileNotFoundError:
            return {}

    def size(self, name: str) -> int | None:
        """Return the bytes of one file; None where there is none."""
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return None

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one: a link appears whole or not at all, on network file systems too."""
        self._make_root()
        target = self.root / name
        scratch = self.root / f"{name}-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns():x}"
        try:
            scratch.write_bytes(data)
            os.link(scratch, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return self._create(target, data)
        finally:
            scratch.unlink(missing_ok=True)
        return True

    def _create(self, target: Path, data: bytes) -> bool:
        try:
            with target.open("xb") as file:
                write(file, data)
        except FileExistsError:
            return False
        return True

    def _make_root(self) -> None:
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            self.made_root = True

    def prune(self) -> None:
        """Remove the directories of a dataset that are empty, and its own if this store made it."""
        for directory in (self.root / TMP, self.root / "shards", self.root / "tokenizer"):
            with suppress(OSError):  # it holds something, or is not there
                directory.rmdir()
        if self.made_root:
            with suppress(OSError):
                self.root.rmdir()

    def remove(self, name: str) -> None:
        """Remove one file."""
        (self.root / name).unlink(missing_ok=True)

    def sweep(self, *, everything: bool = False) -> None:
        """Remove unpublished files that are stale, or all of them once the build is done."""
        for name in self.sizes(TMP):
            path = self.root / TMP / name
            with suppress(FileNotFoundError):
                if SCRATCH.fullmatch(name) and (everything or time.time() - path.stat().st_mtime > STALE_S):
                    path.unlink()
        if everything:
            with suppress(OSError):  # what others put there stays
                (self.root / TMP).rmdir()


def canonical(value: Any) -> bytes:
    """Return the one JSON text of `value` that digests are taken of: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def seal(record: Mapping[str, Any]) -> bytes:
    """Return `record` as readable JSON, with the xxh3_128 of its canonical form as the field `checksum`."""
    sealed = {**record, "checksum": xxhash.xxh3_128_hexdigest(canonical(record))}
    return json.dumps(sealed, indent=1, ensure_ascii=True).encode() + b"\n"


def unseal(data: bytes, where: str, rule: str) -> dict[str, Any]:
    """Parse what `seal` wrote.

    Raises:
        FormatError: Not JSON, or changed since it was written.
    """
    try:
        record = json.loads(data)
        checksum = record.pop("checksum")
        expected = xxhash.xxh3_128_hexdigest(canonical(record))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FormatError(
            f"{where}: is not a sealed JSON file (rule {rule}). Restore it, or delete it and build with --resume.", rule
        ) from error
    if checksum != expected or not data.endswith(b"}\n"):
        raise FormatError(
            f"{where}: does not match its own checksum (rule {rule}). "
            "Restore it, or delete it and build with --resume.",
            rule,
        )
    return dict(record)


def hash_file(path: Path) -> str:
    """Return the xxh3_128 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
