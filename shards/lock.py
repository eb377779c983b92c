"""One writer of a place at a time, by nothing but files: no flock, so network file systems and object stores will do.

The lock is `lock.json`: the identity of the work (a plan's id, say) and its owners with their heartbeats. It is created
only where there is none. Owners of the same work share it; other work, and work that wants the place alone, is refused
while an owner lives. An owner is dead when its process is gone from this machine, or when its last heartbeat is
`STALE_S` old: then the lock is taken over, and that is said. Clocks of machines that share a place should agree within
a minute.
"""

import errno
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shards.errors import PackError

NAME = "lock.json"
CLAIM = "lock.claim.json"  # who has it may replace a dead owner's lock
BEAT_S = 10.0
STALE_S = 120.0
ATTEMPTS = 20
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
Owners = dict[str, dict[str, Any]]


class LockedError(PackError):
    """Somebody else writes there, or has taken over."""


class Place(Protocol):
    """What a lock needs of a store."""

    location: str

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write a file whole."""

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one; return whether it was written."""

    def get(self, name: str) -> bytes | None:
        """Read a file; None where there is none."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def prune(self) -> None:
        """Remove directories that are empty."""


class Lock:
    """Hold a place while writing there: a context manager.

    Args:
        store: The place.
        identity: What is done there; owners with the same identity share the lock.
        noun: What owners are, for messages: "build", "training run".
        alone: Refuse other owners of the same identity too, until `share`.
        on_message: Told when a dead owner's lock is taken over.

    A place that cannot be written to is not locked: what follows cannot write there either.

    Raises:
        LockedError: On entering, where others are at work there.
    """

    def __init__(
        self,
        store: Place,
        identity: str,
        noun: str = "build",
        *,
        alone: bool = False,
        on_message: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.store, self.identity, self.noun, self.alone, self.on_message = store, identity, noun, alone, on_message
        self.id = uuid.uuid4().hex
        self.held = False
        self._lost = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="shardpack-lock")

    def __enter__(self) -> "Lock":
        try:
            self._acquire()
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            return self
        self.held = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if not self.held:
            return
        self._thread.join()
        self.held = False
        lock = self._read()
        if lock is None or self.id not in lock["owners"]:
            return
        others = _alive({key: owner for key, owner in lock["owners"].items() if key != self.id})
        if others:
            self.store.put(NAME, _content(lock["identity"], lock["alone"], others))
        else:
            self.store.remove(NAME)
            self.store.prune()  # nobody is at work there, who would miss an empty directory

    def check(self) -> None:
        """Raise LockedError where other work has taken the place over: this process was taken for dead."""
        if self._lost:
            raise LockedError(self._lost)

    def share(self) -> None:
        """Let other owners of the same identity in from now on."""
        if self.alone:
            self.alone = False
            if self.held:
                self._renew()

    def _acquire(self) -> None:
        for _ in range(ATTEMPTS):
            if self.store.put_new(NAME, self._with_me({})):
                return
            lock = self._read()
            if lock is None:  # released in between
                continue
            if lock["identity"] is None and not lock["owners"]:  # perhaps about to be written
                time.sleep(0.01)
                lock = self._read() or lock
            owners = _alive(lock["owners"])
            if not owners:
                if self._take_over():
                    return
                continue
            if lock["identity"] == self.identity and not self.alone and not lock["alone"]:
                self.store.put(NAME, self._with_me(owners))
                return
            silence_s = max(0, round(time.time() - max(owner["beat"] for owner in owners.values())))
            raise LockedError(
                f"{self.store.location}: another {self.noun} writes there ({_names(owners)}, last sign of life "
                f"{silence_s} s ago); expected none. "
                "Wait for it to end, stop it, or choose another `out`."
            )
        raise LockedError(f"{self.store.location}/{NAME}: comes and goes; expected to get it. Run the command again.")

    def _take_over(self) -> bool:
        """Replace a lock whose owners are dead; return whether this process did.

        Two processes may read the same dead lock. Only one at a time has the claim, and it reads the lock again, so
        the second finds the first one's lock and leaves it alone.
        """
        if not self.store.put_new(CLAIM, self._with_me({})):
            claim = self._read(CLAIM)
            if claim is not None and not _alive(claim["owners"]):
                self.store.remove(CLAIM)
            time.sleep(0.02)
            return False
        try:
            lock = self._read()
            if lock is None or _alive(lock["owners"]):
                return False
            self.store.put(NAME, self._with_me({}))
        finally:
            self.store.remove(CLAIM)
        gone = _names(lock["owners"])
        self.on_message(f"{self.store.location}: took over the lock of {gone}, which died there")
        return True

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self._renew()
            except OSError:  # a moment's failure; the next beat comes before anybody takes this for death
                continue

    def _renew(self) -> None:
        lock = self._read()
        if lock is None:
            if not self.store.put_new(NAME, self._with_me({})):
                self._renew()
        elif lock["identity"] != self.identity or (lock["alone"] and self.id not in lock["owners"]):
            self._lost = (
                f"{self.store.location}: another {self.noun} took this place over ({_names(lock['owners'])}), since "
                f"this one gave no sign of life for {STALE_S:.0f} s; expected to be the only one. Run it again later."
            )
            self._stop.set()
        else:
            self.store.put(NAME, self._with_me(lock["owners"]))

    def _read(self, name: str = NAME) -> dict[str, Any] | None:
        """Return the lock, or the claim; None where there is none. What cannot be parsed belongs to nobody."""
        data = self.store.get(name)
        if data is None:
            return None
        try:
            lock = json.loads(data)
            owners = {str(key): owner for key, owner in lock["owners"].items() if float(owner["beat"]) >= 0}
            return {"identity": lock["identity"], "alone": bool(lock["alone"]), "owners": owners}
        except (ValueError, TypeError, KeyError, AttributeError):
            return {"identity": None, "alone": False, "owners": {}}

    def _with_me(self, owners: Owners) -> bytes:
        me = {"host": platform.node(), "machine": _machine(), "pid": os.getpid(), "beat": time.time()}
        return _content(self.identity, self.alone, {**owners, self.id: me})


def _content(identity: str, alone: bool, owners: Owners) -> bytes:
    return json.dumps({"identity": identity, "alone": alone, "owners": owners}).encode()


def _alive(owners: Owners) -> Owners:
    return {key: owner for key, owner in owners.items() if not _dead(owner)}


def _dead(owner: dict[str, Any]) -> bool:
    # os.kill with 0 asks whether a process is there; on Windows it would end it
    if os.name == "posix" and owner.get("machine") == _machine() and isinstance(owner.get("pid"), int):
        try:
            os.kill(owner["pid"], 0)
        except ProcessLookupError:
            return True
        except OSError:  # it is there, and another user's
            pass
    return time.time() - float(owner["beat"]) > STALE_S


def _machine() -> str:
    """Return what tells the process numbers of this place from those of any other: boot and process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return f"{platform.node()} {uuid.getnode():x}"


def _names(owners: Owners) -> str:
    return (
        ", ".join(f"process {owner.get('pid')} on {owner.get('host')}" for owner in owners.values()) or "nobody known"
    )
