"""Datasets under a URL, in fsspec's memory, read through the cache; and what happens when the store misbehaves."""

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import fsspec
import numpy as np
import pytest

from shards import Cache, Dataset, FormatError, OptionError, PackError
from shards.errors import SourceError
from shards.fetching import remote
from shards.fetching.ahead import ReadAhead
from shards.fetching.mirror import check_blocks

PACKS = {f"part-{k}": [[3, 2], [4], [1, 1, 2 + k]] for k in range(6)}


class FaultyStore:
    """Counts what is fetched, and fails on request."""

    def __init__(self, filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.filesystem, self.gets = filesystem, Counter[str]()
        self.faults: list[Any] = []
        "What the next transfers do: raise, or cut the file to so many bytes."
        get_file, cat_file = type(filesystem).get_file, type(filesystem).cat_file

        def get(this: Any, path: str, target: str, **named: Any) -> None:
            self.gets[Path(path).name] += 1
            fault = self.faults.pop(0) if self.faults else None
            if isinstance(fault, BaseException):
                raise fault
            get_file(this, path, target, **named)
            if isinstance(fault, int):
                Path(target).write_bytes(Path(target).read_bytes()[:fault])

        def cat(this: Any, path: str, **named: Any) -> bytes:
            if self.faults and isinstance(self.faults[0], BaseException):
                raise self.faults.pop(0)
            return bytes(cat_file(this, path, **named))

        monkeypatch.setattr(type(filesystem), "get_file", get)
        monkeypatch.setattr(type(filesystem), "cat_file", cat)

    @property
    def shards(self) -> Counter[str]:
        return Counter({name: count for name, count in self.gets.items() if "-" in name})


@pytest.fixture
def here(write_dataset: Any) -> Path:
    path: Path = write_dataset(PACKS)
    return path


@pytest.fixture
def store(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    filesystem = fsspec.filesystem("memory")
    filesystem.put(str(here), "/dataset", recursive=True)
    yield FaultyStore(filesystem, monkeypatch)
    filesystem.rm("/dataset", recursive=True)


URL = "memory://dataset"


def test_a_url_reads_as_the_directory_does_and_fetches_each_shard_once(here, store, tmp_path):
    local, dataset = Dataset(here), Dataset(URL, cache=tmp_path / "cache")
    assert store.shards == {}  # opening fetches none
    for _ in range(2):
        assert len(dataset) == len(local) == 18
        for left, right in zip(local, dataset, strict=True):
            assert {name: np.asarray(value).tolist() for name, value in left.items()} == {
                name: np.asarray(value).tolist() for name, value in right.items()
            }
        assert set(store.shards.values()) == {1}
        assert len(store.shards) == 6
        dataset = Dataset(URL, cache=tmp_path / "cache")  # a restarted process
    assert dataset.plan == local.plan
    assert str(URL) in repr(dataset)


def test_a_dataset_of_a_url_pickles_with_its_cache(store, tmp_path):
    dataset = Dataset(URL, cache=Cache(tmp_path / "cache", "1GB"))
    again = pickle.loads(pickle.dumps(dataset))
    assert again.dataset_id == dataset.dataset_id
    assert again.path == dataset.path
    assert again.mirror.cache.limit == 10**9


def test_a_cache_of_two_shards_serves_them_all(here, store, tmp_path):
    size = int(Dataset(here).shards.columns["bytes"].max())
    dataset = Dataset(URL, cache=Cache(tmp_path / "cache", 2 * size))
    for pack in (0, 17, 3, 9, 0):
        assert dataset[pack]["input_ids"].tolist() == Dataset(here)[pack]["input_ids"].tolist()
        assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/shards/*.arrow")) <= 2 * size


def test_transfers_that_fail_or_are_cut_short_are_tried_again(store, tmp_path):
    dataset = Dataset(URL, cache=tmp_path / "cache")
    store.faults = [ConnectionResetError(104, "Connection reset by peer"), 10, TimeoutError("timed out"), 0]
    assert dataset[0]["cu_seqlens"].tolist() == [0, 3, 5]
    assert list(store.shards.values()) == [5]


def test_a_store_that_stays_away_is_one_line_with_the_number_of_attempts(store, tmp_path):
    dataset = Dataset(URL, cache=tmp_path / "cache")
    store.faults = [OSError(500, "Internal Error")] * 20
    with pytest.raises(SourceError, match=r"arrow: cannot be read \(.*Internal Error, 6 times in a row\)\. Check the"):
        dataset[0]
    assert not list((tmp_path / "cache").glob("*/shards/*"))  # nothing half done


def test_expired_credentials_are_said_at_once_and_never_cost_what_is_here(store, tmp_path):
    dataset = Dataset(URL, cache=tmp_path / "cache")
    dataset[0]
    store.faults = [PermissionError("The provided token has expired.")]
    with pytest.raises(SourceError, match=r"cannot be read \(The provided token has expired\)"):
        dataset[17]
    assert Dataset(URL, cache=tmp_path / "cache")[0]["cu_seqlens"].tolist() == [0, 3, 5]
    assert Counter(store.shards.values())[1] == 2  # one came, one was refused; none was fetched again


def test_an_object_replaced_under_the_same_name_is_never_mapped(here, store, tmp_path):
    dataset = Dataset(URL, cache=tmp_path / "cache")
    files = dataset.shards.files()
    data = bytearray((here / files[2]).read_bytes())
    data[-100] ^= 1
    store.filesystem.pipe_file(f"/dataset/{files[2]}", bytes(data))
    with pytest.raises(FormatError, match=rf"{Path(files[2]).name}: does not match its checksum \(rule F4\)\. It was"):
        dataset[6]
    store.filesystem.pipe_file(f"/dataset/{files[3]}", bytes(data) + b"more")
    with pytest.raises(FormatError, match=r"has [\d,]+ bytes, [\d,]+ are listed \(rule F4\)"):
        dataset[9]
    store.filesystem.rm_file(f"/dataset/{files[4]}")
    with pytest.raises(FormatError, match=r"is missing \(rule F4\)"):
        dataset[12]
    assert dataset[0]["cu_seqlens"].tolist() == [0, 3, 5]


def test_a_shard_that_the_cache_disk_damaged_is_fetched_again(store, tmp_path):
    dataset = Dataset(URL, cache=tmp_path / "cache")
    first = dataset[0]["input_ids"].tolist()
    file = dataset.path / dataset.shards.files()[0]
    dataset.check_hashes([0])
    del dataset
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(bytes(data))
    dataset = Dataset(URL, cache=tmp_path / "cache")
    dataset.check_hashes([0])
    assert dataset[0]["input_ids"].tolist() == first
    assert store.shards[file.name] == 2


def test_a_dataset_that_is_still_being_written_is_said_so(store, tmp_path):
    store.filesystem.rm_file("/dataset/manifest.json")
    with pytest.raises(FormatError, match=r"memory://dataset: holds a dataset that is still being built"):
        Dataset(URL, cache=tmp_path / "cache")
    with pytest.raises(FormatError, match=r"memory://nothing: is not a shardpack dataset"):
        Dataset("memory://nothing", cache=tmp_path / "cache")


def test_no_message_shows_credentials(monkeypatch):
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    with pytest.raises(PackError) as caught:
        Dataset("http://user:geheim@127.0.0.1:9/dataset?X-Amz-Signature=geheim", cache=None)
    assert "geheim" not in str(caught.value)


def items_of(*packs: list[int]) -> list[tuple[np.ndarray, int]]:
    return [(np.array(ids), number) for number, ids in enumerate(packs)]


def test_items_come_in_order_with_their_shards_here_while_later_ones_are_fetched(store, tmp_path):
    dataset = Dataset(URL, cache=tmp_path / "cache")
    items = items_of([0, 4], [~5], [17, 1], [9])
    ahead = ReadAhead(items, dataset.shards, dataset.mirror)
    seen = []
    for packs, note in ahead:
        seen.append(note)
        for pack in packs.tolist():
            assert (dataset.path / dataset.shard_of(max(pack, ~pack))[0]["file"]).exists()
    assert seen == [0, 1, 2, 3]
    ahead.close()
    assert sorted(store.shards.values()) == [1, 1, 1, 1]


def test_reading_ahead_stops_where_the_cache_is_full_and_every_shard_is_fetched_once(store, here, tmp_path):
    size = int(Dataset(here).shards.columns["bytes"].max())
    dataset = Dataset(URL, cache=Cache(tmp_path / "cache", 4 * size))
    ahead = ReadAhead(items_of(*([pack] for pack in range(18))), dataset.shards, dataset.mirror)
    for _, _ in ahead:
        held = 0
        for path in (tmp_path / "cache").glob("*/shards/*.arrow"):
            with suppress(FileNotFoundError):  # threads that read ahead remove others meanwhile
                held += path.stat().st_size
        assert held <= 4 * size
    ahead.close()
    assert set(store.shards.values()) == {1}
    assert len(store.shards) == 6


def test_a_fault_is_raised_where_its_shard_is_needed_and_not_before(store, tmp_path):
    dataset = Dataset(URL, cache=tmp_path / "cache")
    store.filesystem.rm_file(f"/dataset/{dataset.shards.files()[5]}")
    ahead = ReadAhead(items_of([0], [3], [17]), dataset.shards, dataset.mirror)
    assert [next(ahead)[1], next(ahead)[1]] == [0, 1]
    with pytest.raises(FormatError, match="is missing"):
        next(ahead)
    ahead.close()


def test_a_fault_of_the_order_reaches_the_consumer(here):
    def items() -> Iterator[tuple[np.ndarray, int]]:
        yield np.array([0]), 0
        raise OptionError("seed", "broken.")

    dataset = Dataset(here)
    ahead = ReadAhead(items(), dataset.shards, None)
    assert next(ahead)[1] == 0
    with pytest.raises(OptionError, match="broken"):
        next(ahead)
    ahead.close()


def test_closing_before_the_end_ends_every_thread(store, tmp_path):
    dataset = Dataset(URL, cache=tmp_path / "cache")
    ahead = ReadAhead(items_of(*([pack] for pack in range(18))), dataset.shards, dataset.mirror)
    next(ahead)
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)
    assert not any(thread.name.startswith(("fetch", "plan")) for thread in enumerate_threads())


def test_a_cache_below_two_blocks_is_refused(here, store, tmp_path):
    dataset = Dataset(here)
    sizes = sorted(dataset.shards.columns["bytes"].tolist())
    for limit, fits in ((sum(sizes[-4:]), True), (sum(sizes[-4:]) - 1, False)):
        cache = Cache(tmp_path / "cache", limit)
        if fits:
            check_blocks(dataset.shards, cache, "block-shuffled", 2, [])
            continue
        with pytest.raises(OptionError, match=r"`cache_limit`: .* room for two blocks of 2 shards\. Raise it, or"):
            check_blocks(dataset.shards, cache, "block-shuffled", 2, [])
    with pytest.raises(OptionError, match=r"expected at least [\d,]+, room for the whole dataset, since the order"):
        check_blocks(dataset.shards, Cache(tmp_path / "cache", sum(sizes) - 1), "shuffled", 2, [])
    check_blocks(dataset.shards, Cache(tmp_path / "cache", sum(sizes)), "shuffled", 2, [])
    mixed = sum(dataset.shards.columns["bytes"][:2].tolist())  # each source has one shard
    check_blocks(dataset.shards, Cache(tmp_path / "cache", mixed), "block-shuffled", 2, ["part-0", "part-1"])
    with pytest.raises(OptionError, match="`cache_limit`"):
        check_blocks(dataset.shards, Cache(tmp_path / "cache", mixed - 1), "block-shuffled", 2, ["part-0", "part-1"])


def test_items_are_planned_before_they_are_asked_for(here):
    planned_far = Event()

    def items() -> Iterator[tuple[np.ndarray, int]]:
        for number in range(60):
            if number == 20:
                planned_far.set()
            yield np.array([0]), number

    dataset = Dataset(here)
    ahead = ReadAhead(items(), dataset.shards, None)
    assert next(ahead)[1] == 0
    assert planned_far.wait(60)  # nobody asked for the second
    assert [note for _, note in ahead] == list(range(1, 60))
    ahead.close()
