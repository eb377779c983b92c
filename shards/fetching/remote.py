"""Files that lie elsewhere: URLs through fsspec, and the object store that a dataset is published to.

An object store needs no rename: a finished upload is atomic, an unfinished one is invisible. So a window is written and
hashed here, uploaded whole under its content's name, and only then its sidecar; the manifest goes last, and only if
there is none. Add a kind of place by writing the methods of `shards.publish.Store`.
"""

import errno
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

from shards.errors import FormatError, PackError, SourceError, reason_of
from shards.publish import STALE_S, LocalStore, Store, hash_file

T = TypeVar("T")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
CLIENT_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("aiohttp", "ClientError"),
    ("httpx", "HTTPError"),
    ("gcsfs.retry", "HttpError"),
)
ATTEMPTS = 6
BACKOFF_S = 0.5  # before the second attempt, then twice as long each time
MISMATCHES = 2  # transfers of what is not the file that was written, until it counts as another one
SCRATCH = "shardpack-"
OWN_SCRATCH = re.compile(rf"{SCRATCH}\d+-[0-9a-f]+-.+")  # what `RemoteStore.scratch` names files


def is_url(location: str) -> bool:
    """Whether a location belongs to fsspec."""
    return "://" in location


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL, and the path inside it.

    Raises:
        SourceError: What this kind of URL needs is not installed.
    """
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        fault = hide_secrets(f"{url}: {error}")
        raise SourceError(f"{fault}. Install what fsspec needs for this kind of URL.") from None
    return filesystem, path


@contextmanager
def reaching(location: str, name: str | None = None) -> Iterator[None]:
    """Turn what reading a place raises into a `SourceError`.

    Clients of object stores raise classes of their own (no connection, no credentials), which no list can hold; that of
    web servers raises ValueError where a server gives no parts of a file.
    """
    try:
        yield
    except PackError:
        raise
    except Exception as error:
        foreign = isinstance(error, ValueError) or type(error).__module__ != "builtins"
        if not isinstance(error, OSError) and not (is_url(location) and foreign):
            raise
        what = "URL, the network and the credentials" if is_url(location) else "path and its permissions"
        reason = getattr(error, "strerror", None) or reason_of(error)
        where = name or location
        fault = hide_secrets(f"{where}: cannot be read ({reason})")
        raise SourceError(f"{fault}. Check the {what}.") from None


def hide_secrets(text: str) -> str:
    """Return a text without what URLs in it carry to sign in: user and password, and queries of web addresses."""
    text = re.sub(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", r"\1", text)
    return re.sub(r"(\bhttps?://[^\s?#'\"]+)[?#][^\s'\")]*?(?=[:.,;]?(?:[\s'\")]|$))", r"\1", text)


def io_errors() -> tuple[type[Exception], ...]:
    """Return what files and object stores raise: some clients' own errors are no OSError."""
    found = [getattr(sys.modules[module], name, OSError) for module, name in CLIENT_ERRORS if module in sys.modules]
    return (OSError, *found)


class RemoteStore:
    """A dataset under an fsspec URL, such as s3://bucket/prefix."""

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")
        self.shown = hide_secrets(self.location)
        "The location as messages may show it."

    @cached_property
    def _target(self) -> tuple[Any, str]:
        return filesystem_of(self.location)

    def _path(self, name: str) -> str:
        return f"{self._target[1]}/{name}"

    def create(self) -> None:
        """Check that the place can be reached."""
        try:
            self._target[0].exists(self._path("plan.json"))
        except io_errors() as error:
            raise PackError(
                f"--out {self.location}: cannot be reached ({error}). Check the URL and the credentials."
            ) from error

    def scratch(self, name: str) -> Path:
        """Return a fresh path in this machine's directory for temporary files."""
        return Path(tempfile.gettempdir()) / f"{SCRATCH}{os.getpid()}-{time.monotonic_ns():x}-{name}"

    def publish(self, scratch: Path, name: str) -> None:
        """Upload a finished file whole."""
        self._target[0].put_file(str(scratch), self._path(name))

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """Upload `data`."""
        try:
            self._target[0].pipe_file(self._path(name), data, mode="create" if if_absent else "overwrite")
        except FileExistsError as error:
            raise PackError(
                f"{self.location}/{name}: is there already; another build finished first. Run pack verify on a copy."
            ) from error

    def get(self, name: str) -> bytes | None:
        """Download a whole file; None where there is none."""
        try:
            return bytes(self._target[0].cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes | None:
        """Read a whole file as it is now, trying again where the network fails; None where there is none.

        Raises:
            SourceError: It cannot be read.
        """
        try:
            return self._trying(name, lambda: bytes(self._target[0].cat_file(self._path(name))))
        except FileNotFoundError:
            return None

    def fetch(self, name: str, target: Path, size: int, digest: str, rule: str) -> None:
        """Download a file and check it, trying again where the network fails.

        Args:
            name: The file.
            target: Where it goes.
            size: Its bytes, as they were listed.
            digest: Its xxh3_128, as it was listed.
            rule: The rule that lists them.

        Raises:
            FormatError: It is missing, or another one.
            SourceError: It cannot be read.
            OSError: The disk is full.
        """
        mismatches = 0

        def transfer() -> None:
            nonlocal mismatches
            self._target[0].get_file(self._path(name), str(target))
            found = target.stat().st_size
            if found < size:  # a body that was cut short
                raise OSError(f"only {found:,} of {size:,} bytes came")
            if found > size or hash_file(target) != digest:
                mismatches += 1
                what = f"has {found:,} bytes, {size:,} are listed" if found > size else "does not match its checksum"
                if mismatches == MISMATCHES:
                    raise FormatError(
                        f"{self.shown}/{name}: {what} (rule {rule}). It was replaced or damaged there: restore it.",
                        rule,
                    )
                raise OSError(what)

        try:
            self._trying(name, transfer)
        except FileNotFoundError as error:
            raise FormatError(f"{self.shown}/{name}: is missing (rule {rule}). Restore it.", rule) from error

    def send(self, file: Path, name: str) -> None:
        """Upload a file whole, trying again where the network fails.

        Raises:
            SourceError: It cannot be written.
        """
        self._trying(name, lambda: self._target[0].put_file(str(file), self._path(name)), "written")

    def _trying(self, name: str, call: Callable[[], T], verb: str = "read") -> T:
        for attempt in count(1):
            try:
                return call()
            except FileNotFoundError:
                raise
            except io_errors() as error:
                if getattr(error, "errno", None) in DISK_FULL:
                    raise
                if attempt == ATTEMPTS or _is_final(error):
                    tried = f", {attempt} times in a row" if attempt > 1 else ""
                    raise SourceError(
                        f"{self.shown}/{name}: cannot be {verb} ({hide_secrets(reason_of(error))}{tried}). Check the "
                        "URL, the network, the credentials and this machine's clock."
                    ) from None
            time.sleep(BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError("count never ends")

    def sizes(self, directory: str) -> dict[str, int]:
        """Return bytes by file name; directory "" is the root."""
        filesystem = self._target[0]
        filesystem.invalidate_cache()
        try:
            entries = filesystem.ls(self._path(directory).rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in entries}

    def size(self, name: str) -> int | None:
        """Return the bytes of one file; None where there is none."""
        try:
            return int(self._target[0].size(self._path(name)))
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Remove one file."""
        with suppress(FileNotFoundError):
            self._target[0].rm_file(self._path(name))

    def remove_directory(self, name: str) -> None:
        """Remove a directory that is empty, where the place has directories."""
        with suppress(OSError):
            self._target[0].rmdir(self._path(name))

    def put_new(self, name: str, data: bytes) -> bool:
        """Upload `data` unless there is such a file; return whether it was uploaded."""
        self._target[0].invalidate_cache()
        try:
            self._target[0].pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def prune(self) -> None:
        """An object store has no directories."""

    def sweep(self, *, everything: bool = False) -> None:  # noqa: ARG002  # as LocalStore.sweep
        """Remove scratch files of builds that died here; a build removes its own as it goes."""
        for path in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
            with suppress(OSError):  # gone already
                status = path.lstat()
                stale = time.time() - status.st_mtime > STALE_S
                if stale and OWN_SCRATCH.fullmatch(path.name) and S_ISREG(status.st_mode) and status.st_uid == _user():
                    path.unlink()


def _is_final(error: Exception) -> bool:
    """Whether another attempt would end the same: not allowed, or a request that the server refuses."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    return refused or isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0  # Windows has no user numbers, and gives 0 for every file


def open_store(out: str) -> Store:
    """Return the store that --out names."""
    return RemoteStore(out) if is_url(out) else LocalStore(out)
