"""Items of an order, handed on once the shards that they need are here, while those of later items are fetched.

One thread plans: it takes items as far ahead as the cache has room, and asks for their shards in the order in which
they are needed. A few threads fetch. The consumer waits for the shards of its own item and nothing else. Of a dataset
on this machine nothing is fetched, and planning is what is left: a block is built before its first step.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition, Event
from typing import Generic, TypeVar

import numpy as np

from shards.fetching.cache import Kept, NoRoomError
from shards.fetching.mirror import Mirror
from shards.tables.shard_list import ShardList

Note = TypeVar("Note")
Item = tuple[np.ndarray, Note]

FETCHERS = 6
ITEMS_AHEAD = 64  # of a dataset on this machine
MOST_ITEMS = 8192
STILL_USED = 32  # items handed on whose packs may not have been copied yet
RETRY_S = 0.1


class ReadAhead(Generic[Note]):
    """Iterate over items; close it to end its threads.

    Args:
        items: Pack ids, ~id for one that only fills up, and something to hand on with them.
        shards: The shards of the dataset.
        mirror: Where they are fetched to; None for a dataset on this machine.
    """

    def __init__(self, items: Iterable[Item[Note]], shards: ShardList, mirror: Mirror | None) -> None:
        self._items, self._shards, self._mirror = iter(items), shards, mirror
        largest = int(shards.columns["bytes"].max(initial=0))
        self._window = 0 if mirror is None else max(mirror.cache.limit - 2 * largest, largest)
        self._changed = Condition()
        self._closed = Event()
        self._planned: deque[tuple[Item[Note], list[int]]] = deque()
        self._used: deque[list[int]] = deque()
        self._uses: Counter[int] = Counter()
        self._kept: dict[int, Future[Kept]] = {}
        self._urgent: set[int] = set()
        self._bytes = 0
        self._fetchers = ThreadPoolExecutor(FETCHERS, "fetch")
        self._planner = ThreadPoolExecutor(1, "plan")
        self._planning = self._planner.submit(self._plan)
        self._planning.add_done_callback(self._notify)

    def __iter__(self) -> Iterator[Item[Note]]:
        return self

    def __next__(self) -> Item[Note]:
        with self._changed:
            if self._closed.is_set():
                raise StopIteration
            if len(self._used) > STILL_USED:
                self._let_go(self._used.popleft())
            while not self._planned:
                if self._planning.done():
                    self._planning.result()
                    raise StopIteration
                self._changed.wait()
            item, needed = self._planned.popleft()
            self._urgent = set(needed)
            waiting = [self._kept[shard] for shard in needed]
            self._used.append(needed)
            self._changed.notify_all()
        for future in waiting:
            future.result()
        return item

    def close(self) -> None:
        """End the threads; a transfer that is under way ends first."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._planner.shutdown()
        self._fetchers.shutdown(cancel_futures=True)
        with self._changed:
            self._planned.clear()
            for shard in list(self._kept):
                self._drop(shard)

    def _plan(self) -> None:
        for item in self._items:
            needed = self._needed(item[0])
            with self._changed:
                while not self._has_room(needed) and not self._closed.is_set():
                    self._changed.wait()
                if self._closed.is_set():
                    return
                for shard in needed:
                    if shard not in self._uses:
                        self._bytes += self._size(shard)
                        self._kept[shard] = self._fetchers.submit(self._fetch, shard)
                    self._uses[shard] += 1
                self._planned.append((item, needed))
                self._changed.notify_all()

    def _notify(self, _: "Future[None]") -> None:
        with self._changed:
            self._changed.notify_all()

    def _needed(self, packs: np.ndarray) -> list[int]:
        """Return the shards of some packs, in the order of the packs."""
        if self._mirror is None:
            return []
        return list(dict.fromkeys(self._shards.number_of(pack if pack >= 0 else ~pack) for pack in packs.tolist()))

    def _has_room(self, needed: list[int]) -> bool:
        """Whether there is room for one more item; called with the lock."""
        if self._mirror is None:
            return len(self._planned) < ITEMS_AHEAD
        while len(self._used) > 1 and self._bytes + self._more(needed) > self._window and not self._planned:
            self._let_go(self._used.popleft())
        fits = len(self._planned) < MOST_ITEMS and self._bytes + self._more(needed) <= self._window
        return fits or not self._planned

    def _more(self, needed: list[int]) -> int:
        return sum(self._size(shard) for shard in needed if shard not in self._uses)

    def _size(self, shard: int) -> int:
        return int(self._shards.columns["bytes"][shard])

    def _fetch(self, shard: int) -> Kept:
        assert self._mirror is not None
        while True:
            try:
                return self._mirror.shard(self._shards[shard], waited_for=shard in self._urgent)
            except NoRoomError:  # others on this machine use it all; some of it is free soon
                if self._closed.wait(RETRY_S):
                    raise

    def _let_go(self, needed: list[int]) -> None:
        for shard in needed:
            self._uses[shard] -= 1
            if not self._uses[shard]:
                del self._uses[shard]
                self._drop(shard)
        self._changed.notify_all()

    def _drop(self, shard: int) -> None:
        future = self._kept.pop(shard)
        self._bytes -= self._size(shard)
        if not future.cancel():
            future.add_done_callback(_release)


def _release(future: "Future[Kept]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()
