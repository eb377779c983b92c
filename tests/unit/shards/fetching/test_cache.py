"""The cache of shards: what it keeps, what it lets go, and who may use it at once."""

import errno
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shards import OptionError, PackError
from shards.fetching.cache import Cache, NoRoomError, parse_size
from shards.sidecar import shard_name

DATASET = "d" * 64


def entry_of(number: int, size: int = 100) -> Any:
    digest = f"{number:032x}"
    return {"file": shard_name(number, digest), "bytes": size, "xxh3_128": digest, "window": number}


class Source:
    """Writes shards of bytes that tell them apart, and notes which."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __call__(self, number: int, size: int = 100) -> Callable[[Path], None]:
        def fetch(path: Path) -> None:
            self.fetched.append(number)
            path.write_bytes(bytes([number]) * size)

        return fetch


@pytest.fixture
def source() -> Source:
    return Source()


def test_a_shard_is_fetched_once_and_found_again_by_another_cache_object(tmp_path, source):
    for _ in range(2):  # the second is what a restarted process makes
        cache = Cache(tmp_path / "cache", 1000)
        kept = cache.hold(DATASET, entry_of(1), source(1))
        assert kept.path.read_bytes() == b"\1" * 100
        kept.release()
    assert source.fetched == [1]


def test_the_shards_used_longest_ago_go_first_and_the_limit_holds(tmp_path, source):
    cache = Cache(tmp_path / "cache", 300)
    for number in (1, 2, 3):
        cache.hold(DATASET, entry_of(number), source(number)).release()
    cache.hold(DATASET, entry_of(1), source(1)).release()  # used again: 2 is the oldest now
    cache.hold(DATASET, entry_of(4), source(4)).release()
    there = sorted(int(path.name[:8]) for path in (tmp_path / "cache").glob("*/shards/*.arrow"))
    assert there == [1, 3, 4]
    assert source.fetched == [1, 2, 3, 4]


def test_a_shard_in_use_never_goes(tmp_path, source):
    cache = Cache(tmp_path / "cache", 200)
    held = [cache.hold(DATASET, entry_of(number), source(number)) for number in (1, 2)]
    with pytest.raises(NoRoomError):
        cache.hold(DATASET, entry_of(3), source(3), waited_for=False)
    urgent = cache.hold(DATASET, entry_of(3), source(3))  # a step that waits for a shard is served all the same
    assert all(kept.path.exists() for kept in (*held, urgent))
    for kept in (*held, urgent):
        kept.release()
    cache.hold(DATASET, entry_of(4), source(4), waited_for=False)
    assert len(list((tmp_path / "cache").glob("*/shards/*.arrow"))) == 2


def test_the_file_of_a_released_shard_is_closed(tmp_path, source):
    cache = Cache(tmp_path / "cache", 1000)
    before = len(os.listdir("/dev/fd"))
    for number in range(1, 5):
        cache.hold(DATASET, entry_of(number), source(number))  # forgotten without a word
    assert len(os.listdir("/dev/fd")) == before


def test_a_cut_off_shard_is_fetched_again(tmp_path, source):
    cache = Cache(tmp_path / "cache", 1000)
    kept = cache.hold(DATASET, entry_of(1), source(1))
    path = kept.path
    kept.release()
    path.write_bytes(b"short")
    assert cache.hold(DATASET, entry_of(1), source(1)).path.read_bytes() == b"\1" * 100
    assert source.fetched == [1, 1]


def test_a_cache_that_was_deleted_is_made_again(tmp_path, source):
    cache = Cache(tmp_path / "cache", 1000)
    cache.hold(DATASET, entry_of(1), source(1)).release()
    shutil.rmtree(tmp_path / "cache")
    Cache(tmp_path / "cache", 1000).hold(DATASET, entry_of(1), source(1)).release()
    assert source.fetched == [1, 1]


def _dies_while_it_fetches(directory: Path) -> None:
    def fetch(path: Path) -> None:
        path.write_bytes(b"half")
        os._exit(9)

    Cache(directory, 250).hold(DATASET, entry_of(1), fetch)


def test_a_process_killed_while_it_fetches_leaves_neither_lock_nor_bytes_that_count(tmp_path, source):
    process = multiprocessing.get_context("fork").Process(target=_dies_while_it_fetches, args=(tmp_path / "cache",))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert len(list((tmp_path / "cache").glob("*/shards/*.lock"))) == 1
    cache = Cache(tmp_path / "cache", 250)
    held = [cache.hold(DATASET, entry_of(number), source(number), waited_for=False) for number in (2, 3)]
    assert sorted(path.name[:8] for path in (tmp_path / "cache").glob("*/shards/*")) == ["00000002", "00000003"]
    held.clear()
    assert cache.hold(DATASET, entry_of(1), source(1)).path.read_bytes() == b"\1" * 100


def _fetches_all(directory: Path, log: Path) -> None:
    cache = Cache(directory, 10_000)
    for number in range(20):

        def fetch(path: Path, number: int = number) -> None:
            with log.open("a") as file:
                file.write(f"{number}\n")
            path.write_bytes(bytes([number]) * 100)

        assert cache.hold(DATASET, entry_of(number), fetch).path.read_bytes() == bytes([number]) * 100


def test_four_processes_on_one_cache_fetch_each_shard_once(tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=_fetches_all, args=(tmp_path / "cache", log)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert sorted(map(int, log.read_text().split())) == list(range(20))


def test_a_full_disk_takes_the_place_of_idle_shards_and_then_is_one_line(tmp_path, source):
    cache = Cache(tmp_path / "cache", 10_000)
    cache.hold(DATASET, entry_of(1), source(1)).release()
    room = 0

    def fetch(path: Path) -> None:
        if len(list((tmp_path / "cache").glob("*/shards/*.arrow"))) > room:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(b"\2" * 100)

    kept = cache.hold(DATASET, entry_of(2), fetch)
    with pytest.raises(PackError, match=r"the disk is full, and no shard there is idle; .* `cache_dir`"):
        cache.hold(DATASET, entry_of(3), fetch)
    assert sorted(path.name[:8] for path in (tmp_path / "cache").glob("*/shards/*")) == ["00000002"]
    kept.release()


@pytest.mark.parametrize(
    ("text", "size"),
    [("500GB", 500 * 10**9), ("1.5T", 1_500 * 10**9), ("64MiB", 64 << 20), ("1000", 1000), (7, 7), ("2 kb", 2000)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "1PB", "GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(OptionError, match=r"`cache_limit`: .*; expected a size such as 500GB"):
        parse_size(text)


def test_a_directory_of_something_else_is_no_cache(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OptionError, match=r"`cache_dir`: .* holds thesis\.tex and is no cache; expected an empty"):
        Cache(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_file_is_no_cache(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"`cache_dir`: .* cannot be used \("):
        Cache(tmp_path / "file")


def test_the_cache_of_another_version_is_left_alone(tmp_path):
    (tmp_path / "cache.json").write_text('{"format": "shardpack-cache", "version": 99}')
    with pytest.raises(OptionError, match="is the cache of another version"):
        Cache(tmp_path)
