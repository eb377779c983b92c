"""Where this machine keeps what is dear to make and safe to lose: machine code of kernels, proofs about tokenizers.

The user's cache directory; where the home cannot be written (containers, service accounts), a private directory below
the temporary one; else none, and everything is made anew in each process.
"""

import os
import stat
import tempfile
from pathlib import Path


def cache_directory(name: str) -> Path | None:
    """Return a directory of the user's own to keep things in, made if need be; None where there is no place.

    Args:
        name: What is kept there.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    directory = _writable(Path(home) if home else Path.home() / ".cache", f"shardpack/{name}")
    return directory or temporary_directory(name)


def temporary_directory(name: str) -> Path | None:
    """Return a directory below the temporary one that only this user can write; None where there is no place.

    What is read from there may be run (numba's cache is pickled), so a directory that somebody else made is not taken.
    """
    root = Path(tempfile.gettempdir()) / f"cache-shardpack-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError:
        return None
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return _writable(root, name) if own else None


def _writable(root: Path, name: str) -> Path | None:
    """Return the directory, made if need be, where files can be made in it."""
    directory = root / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return None
