"""A cache of shards on this machine, shared by all its processes.

    CACHE/cache.json                        says that the directory is a cache
    CACHE/lock                              held while room is made
    CACHE/<dataset id>/                     the metadata of a dataset, as it lies in its own directory
    CACHE/<dataset id>/shards/X.arrow       a shard, whole and checked; its time is when it was last asked for
                              X.arrow.part  what has come of it so far
                              X.arrow.lock  held by the process that fetches it, as long as the shard will be

Locks are those of `flock`, which end with the process that has them, however it ends. A shard in use has its own file
locked, and nobody removes it. What is used is counted from the directory itself, so there is nothing to repair after a
crash, and the directory may be deleted whenever nobody uses it. Only shards count against the limit.
"""

import json
import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shards.errors import OptionError, PackError
from shards.fetching.remote import DISK_FULL

if TYPE_CHECKING:
    from shards.tables.shard_list import ShardEntry

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

DEFAULT_LIMIT = "100GB"
MARKER, LOCK = "cache.json", "lock"
MARK = {"format": "shardpack-cache", "version": 1}
UNITS = "KMGT"


class NoRoomError(Exception):
    """All that would have to go is in use."""


class Kept:
    """A shard in the cache, which stays there until it is released.

    Args:
        path: Its file.
        handle: The open file, locked.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.release = weakref.finalize(self, os.close, handle)
        "Let the shard go; closing the file ends the lock."


class Cache:
    """A directory of fetched shards.

    Args:
        directory: Made where there is none.
        limit: Most bytes of shards in it, such as "500GB" or a number of bytes.

    Raises:
        OptionError: The directory is something else, cannot be written, or the limit is no size.
    """

    def __init__(self, directory: str | Path | None = None, limit: str | int = DEFAULT_LIMIT) -> None:
        if fcntl is None:
            raise OptionError("cache_dir", "a cache needs the file locks of Linux or macOS; expected one of these.")
        self.directory = default_directory() if directory is None else Path(directory).absolute()
        self.limit = parse_size(limit)
        self._claim()

    def __reduce__(self) -> tuple[type["Cache"], tuple[Path, int]]:
        return (Cache, (self.directory, self.limit))

    def _claim(self) -> None:
        """Mark the directory as a cache, unless it holds something else."""
        where, marker = self.directory, self.directory / MARKER
        try:
            where.mkdir(parents=True, exist_ok=True)
            stranger = next((path.name for path in sorted(where.iterdir()) if path.name not in (MARKER, LOCK)), None)
            if stranger is not None and not marker.exists():
                raise OptionError(
                    "cache_dir",
                    f"{where} holds {stranger} and is no cache; expected an empty or a new directory, or a cache. "
                    "Choose another.",
                )
            if not marker.exists():
                marker.write_text(json.dumps(MARK))
            mark = json.loads(marker.read_text() or "null")
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or f"{MARKER} is not readable"
            raise OptionError(
                "cache_dir", f"{where} cannot be used ({reason}); expected a directory to write to. Choose another."
            ) from error
        if mark not in (MARK, None):  # None: another process is about to write it
            raise OptionError("cache_dir", f"{where} is the cache of another version; expected {MARK}. Choose another.")

    def folder(self, dataset_id: str) -> Path:
        """Return the directory that mirrors a dataset."""
        return self.directory / dataset_id[:32]

    def hold(
        self, dataset_id: str, entry: "ShardEntry", fetch: Callable[[Path], None], *, waited_for: bool = True
    ) -> Kept:
        """Return a shard, fetched unless it is here; another process that fetches it now is waited for.

        Args:
            dataset_id: The dataset that it belongs to.
            entry: The shard.
            fetch: Writes the shard to a path, and has checked it when it returns.
            waited_for: Whether somebody waits: where all else is in use it then goes over the limit.

        Raises:
            NoRoomError: Nobody waits, and all else is in use.
            PackError: The disk is full.
        """
        path = self.folder(dataset_id) / entry["file"]
        while True:
            kept = self._take(path, entry["bytes"]) or self._fetch(path, entry["bytes"], fetch, waited_for)
            if kept is not None:
                return kept

    def discard(self, kept: Kept) -> None:
        """Remove a shard that turned out to be damaged."""
        with suppress(FileNotFoundError):
            kept.path.unlink()
        kept.release()

    def _take(self, path: Path, size: int) -> Kept | None:
        """Hold a shard that is here; one that was cut short, by a full disk or a lost machine, is removed."""
        kept = _open_locked(path)
        if kept is None:
            return None
        if path.stat().st_size != size:
            self.discard(kept)
            return None
        os.utime(path)
        return kept

    def _fetch(self, path: Path, size: int, fetch: Callable[[Path], None], waited_for: bool) -> Kept | None:
        """Fetch a shard; None where another process did so meanwhile."""
        lock_path, part = path.with_name(f"{path.name}.lock"), path.with_name(f"{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_path.open("a+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_still(lock.fileno(), lock_path):
                return None
            try:
                if path.exists():
                    return None
                self._make_room(size, waited_for, lambda: os.truncate(lock.fileno(), size))
                self._fill(part, size, fetch)
                kept = _open_locked(part)
                if kept is None:  # somebody emptied the cache
                    return None
                part.rename(path)
                kept.path = path
                return kept
            finally:
                part.unlink(missing_ok=True)
                lock_path.unlink(missing_ok=True)

    def _fill(self, part: Path, size: int, fetch: Callable[[Path], None]) -> None:
        """Fetch into a file; where the disk is full, others go first."""
        while True:
            try:
                fetch(part)
                return
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                part.unlink(missing_ok=True)
                if not self._remove_idle(size):
                    raise PackError(
                        f"{self.directory}: the disk is full, and no shard there is idle; expected room for {size:,} "
                        "bytes more. Make room, or put the cache on a larger disk with `cache_dir`."
                    ) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.directory / LOCK).open("a+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, size: int, waited_for: bool, reserve: Callable[[], None]) -> None:
        """Remove what was used longest ago until there is room under the limit, and reserve it."""
        with self._alone():
            used, idle = self._survey()
            for path in idle:
                if used + size <= self.limit:
                    break
                used -= _remove(path)
            if used + size > self.limit and not waited_for:
                raise NoRoomError
            reserve()

    def _remove_idle(self, size: int) -> int:
        """Remove shards that nobody uses until `size` bytes are free; return how many were."""
        freed = 0
        with self._alone():
            for path in self._survey()[1]:
                if freed >= size:
                    break
                freed += _remove(path)
        return freed

    def _survey(self) -> tuple[int, list[Path]]:
        """Return the bytes that shards take or will take, and those that are here, used longest ago first."""
        used, found = 0, []
        for folder in self.directory.glob("*/shards"):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    if entry.name.endswith(".arrow"):
                        status = entry.stat()
                        used += status.st_size
                        found.append((status.st_mtime_ns, Path(entry.path)))
                    elif entry.name.endswith(".lock"):
                        used += 0 if _is_abandoned(Path(entry.path)) else entry.stat().st_size
        return used, [path for _, path in sorted(found)]


def parse_size(text: str | int) -> int:
    """Parse a number of bytes: 1000000, "500GB", "1.5T".

    Raises:
        OptionError: It is none, or below 1.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(text).upper())
    size = 0
    if match:
        power = UNITS.index(match[2]) + 1 if match[2] else 0
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size < 1:
        raise OptionError("cache_limit", f"{text!r}; expected a size such as 500GB.")
    return size


def default_directory() -> Path:
    """Return where datasets are cached unless somebody says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "shardpack" / "datasets"


def _is_still(handle: int, path: Path) -> bool:
    """Whether an open file still is the one under its name: it may have been removed before it was locked."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _open_locked(path: Path) -> Kept | None:
    """Open a file and share its lock; None where there is none."""
    while True:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_still(handle, path):
            return Kept(path, handle)
        os.close(handle)


def _remove(path: Path) -> int:
    """Remove a shard unless somebody uses it; return its bytes, 0 where it stays."""
    with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(file.fileno(), path):
            path.unlink()
            return os.fstat(file.fileno()).st_size
    return 0


def _is_abandoned(lock_path: Path) -> bool:
    """Whether a shard's fetching process has died; what it left is removed."""
    with suppress(FileNotFoundError, BlockingIOError), lock_path.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(lock.fileno(), lock_path):
            lock_path.with_suffix(".part").unlink(missing_ok=True)
            lock_path.unlink()
        return True
    return False
