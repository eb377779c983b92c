"""One writer of a place: who shares it, who is refused, and what happens to the lock of the dead."""

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from shards import lock as locks
from shards.lock import NAME, STALE_S, Lock, LockedError
from shards.publish import LocalStore

IDENTITY, OTHER = "a" * 64, "b" * 64


class Bucket:
    """An object store: a dict of files, put whole."""

    location = "s3://bucket/data"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        assert not if_absent
        self.files[name] = data

    def put_new(self, name: str, data: bytes) -> bool:
        return self.files.setdefault(name, data) is data

    def get(self, name: str) -> bytes | None:
        return self.files.get(name)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def prune(self) -> None:
        pass


@pytest.fixture(params=["directory", "bucket"])
def place(request, tmp_path) -> Any:
    return LocalStore(tmp_path / "out") if request.param == "directory" else Bucket()


def owners(place: Any) -> list[int]:
    return [owner["pid"] for owner in json.loads(place.get(NAME))["owners"].values()]


def leave_behind(place: Any, identity: str, **owner: Any) -> None:
    """Write the lock of an owner that is gone."""
    fields = {"host": "elsewhere", "machine": "another", "pid": 1, "beat": time.time()} | owner
    record = {"identity": identity, "alone": False, "owners": {"x": fields}}
    assert place.put_new(NAME, json.dumps(record).encode())


def test_work_of_one_identity_shares_the_place_and_the_last_one_leaves_nothing(place):
    with Lock(place, IDENTITY) as first:
        with Lock(place, IDENTITY) as second:
            assert len(owners(place)) == 2
        assert len(owners(place)) == 1
        first.check()
        second.check()
    assert place.get(NAME) is None


def test_other_work_is_refused_while_an_owner_lives(place):
    with Lock(place, IDENTITY):
        with (
            pytest.raises(
                LockedError, match=r"another build writes there \(process \d+ on .*, last sign of life \d+ s"
            ),
            Lock(place, OTHER),
        ):
            pass
        assert len(owners(place)) == 1
    with Lock(place, OTHER):
        assert len(owners(place)) == 1


def test_work_that_wants_the_place_alone_waits_for_its_own_kind_too(place):
    with Lock(place, IDENTITY), pytest.raises(LockedError), Lock(place, IDENTITY, alone=True):
        pass
    with Lock(place, IDENTITY, alone=True) as first:
        with pytest.raises(LockedError), Lock(place, IDENTITY):
            pass
        first.share()
        with Lock(place, IDENTITY):
            assert len(owners(place)) == 2


def test_an_owner_without_a_heartbeat_is_taken_over_and_that_is_said(place):
    said: list[str] = []
    leave_behind(place, OTHER, beat=time.time() - STALE_S - 1)
    with Lock(place, IDENTITY, on_message=said.append):
        assert owners(place) != [1]
    assert said == [f"{place.location}: took over the lock of process 1 on elsewhere, which died there"]


def test_two_that_find_the_same_dead_lock_do_not_both_get_it():
    bucket = Bucket()
    leave_behind(bucket, OTHER, beat=time.time() - STALE_S - 1)
    first, slow = Lock(bucket, IDENTITY), Bucket()
    slow.files = bucket.files

    def read_then_wait(name: str) -> bytes | None:
        """Read the dead lock; the other one takes it over before this one goes on."""
        data = bucket.get(name)
        if not first.held:
            first.__enter__()
        return data

    slow.get = read_then_wait  # type: ignore[method-assign]
    with pytest.raises(LockedError, match="another build writes there"):
        Lock(slow, "c" * 64).__enter__()
    assert first.id in json.loads(bucket.files[NAME])["owners"]
    first.__exit__()
    assert bucket.files == {}


def test_a_claim_left_by_a_process_that_died_is_no_hindrance(place):
    leave_behind(place, OTHER, beat=time.time() - STALE_S - 1)
    assert place.put_new(locks.CLAIM, place.get(NAME))
    with Lock(place, IDENTITY):
        assert owners(place) != [1]
    assert (place.get(NAME), place.get(locks.CLAIM)) == (None, None)


def test_an_owner_on_another_machine_lives_as_long_as_its_heartbeat_is_young(place):
    leave_behind(place, OTHER, beat=time.time() - STALE_S / 2)
    with pytest.raises(LockedError, match="process 1 on elsewhere"), Lock(place, IDENTITY):
        pass


def test_a_process_that_is_gone_from_this_machine_is_dead_at_once(place):
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    leave_behind(place, OTHER, machine=locks._machine(), pid=int(process.stdout))
    with Lock(place, IDENTITY) as lock:
        assert lock.held


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"owners": 3}', b'{"identity": 1, "alone": 0, "owners": {"a": {}}}']
)
def test_a_file_that_is_no_lock_belongs_to_nobody(place, content):
    assert place.put_new(NAME, content)
    with Lock(place, IDENTITY):
        assert len(owners(place)) == 1


def test_a_heartbeat_enters_its_owner_again_where_another_one_has_forgotten_it(place):
    with Lock(place, IDENTITY) as lock:
        place.remove(NAME)
        lock._renew()
        assert len(owners(place)) == 1
        place.put(NAME, json.dumps({"identity": IDENTITY, "alone": False, "owners": {}}).encode())
        lock._renew()
        assert len(owners(place)) == 1


def test_who_was_taken_for_dead_learns_it_and_leaves_the_new_lock_alone(place):
    with Lock(place, IDENTITY) as lock:
        place.remove(NAME)
        leave_behind(place, OTHER)
        lock._renew()
        with pytest.raises(LockedError, match="another build took this place over"):
            lock.check()
    assert owners(place) == [1]


def test_heartbeats_come_by_themselves(place, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.001)
    with Lock(place, IDENTITY):
        first = place.get(NAME)
        deadline = time.monotonic() + 30
        while place.get(NAME) == first:
            assert time.monotonic() < deadline


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    store = LocalStore(tmp_path / "out")
    assert store.put_new("x", b"1")
    assert not store.put_new("x", b"2")
    assert store.get("x") == b"1"


def test_the_last_owner_leaves_no_empty_directory_behind(tmp_path):
    store = LocalStore(tmp_path / "made" / "out")
    with Lock(store, IDENTITY):
        store.create()
        with Lock(LocalStore(store.root), IDENTITY):
            pass
        with pytest.raises(LockedError), Lock(LocalStore(store.root), OTHER):
            pass
        assert {"shards", "tokenizer"} <= {path.name for path in store.root.iterdir()}  # the owner will write there
    assert not store.root.exists()
