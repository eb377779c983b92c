"""Steps that know shards: shards in a keyed random order, packs shuffled inside blocks of a few shards.

For datasets that are fetched while they are read, or too large for a permutation of all packs: an epoch takes its
shards block by block, memory is that of the blocks at hand and under 16 B a shard, and step s of any epoch is found
from (seed, epoch, s) alone. Example, blocks of two of the shards A to E: the epoch may run through the packs of {D, A}
shuffled, then of {C, E}, then of {B}. Mixed sources each have a stream of blocks of their own, from which the sequence
takes packs in fixed proportion: their shares hold within a pack wherever one looks.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from shards.ordering.permutation import KeyedPermutation

CHUNK = 1 << 16  # shards permuted at once
BLOCKS_KEPT = 3


class ShardStream:
    """The packs of some shards, pass after pass, each pass in an order of its own.

    Args:
        first_pack: First pack of each shard; int64 (num_shards,), may be mapped.
        packs: Packs of each shard; same shape.
        key: Seed, and what tells this stream from others.
        block_shards: Shards whose packs are shuffled together.
    """

    def __init__(self, first_pack: np.ndarray, packs: np.ndarray, key: tuple[int, ...], block_shards: int) -> None:
        self._first_pack, self._packs, self._key, self._block_shards = first_pack, packs, key, block_shards
        self.num_packs = int(packs.sum())
        "Packs of one pass."
        self._starts: dict[int, np.ndarray] = {}
        self._blocks: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def take(self, start: int, stop: int) -> np.ndarray:
        """Return packs [start, stop) of the endless stream; int64."""
        parts = []
        while start < stop:
            number, place = divmod(start, self.num_packs)
            starts = self._block_starts(number)
            block = int(np.searchsorted(starts, place, side="right")) - 1
            end = min(stop - start, int(starts[block + 1]) - place)
            begin = place - int(starts[block])
            parts.append(self._block(number, block)[begin : begin + end])
            start += end
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _order(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the shards at places [start, stop) of a pass."""
        return KeyedPermutation(len(self._packs), (*self._key, number))(np.arange(start, stop))

    def _block_starts(self, number: int) -> np.ndarray:
        """Return where each block of a pass starts, in packs, then the packs of the pass."""
        if number not in self._starts:
            shards, size = len(self._packs), self._block_shards
            sums = np.zeros(ceil(shards / size) + 1, np.int64)
            chunk = ceil(CHUNK / size) * size
            for start in range(0, shards, chunk):
                packs = self._packs[self._order(number, start, min(shards, start + chunk))]
                found = np.add.reduceat(packs, np.arange(0, len(packs), size))
                sums[start // size + 1 : start // size + 1 + len(found)] = found
            kept = {pass_: starts for pass_, starts in self._starts.items() if pass_ == number - 1}
            self._starts = {**kept, number: np.cumsum(sums)}
        starts: np.ndarray = self._starts[number]
        return starts

    def _block(self, number: int, block: int) -> np.ndarray:
        """Return the packs of a block in their shuffled order."""
        key = (number, block)
        if key in self._blocks:
            self._blocks.move_to_end(key)
            found: np.ndarray = self._blocks[key]
            return found
        size = self._block_shards
        shards = self._order(number, block * size, min(len(self._packs), (block + 1) * size))
        ranges = [
            np.arange(first, first + packs)
            for first, packs in zip(self._first_pack[shards].tolist(), self._packs[shards].tolist(), strict=True)
        ]
        rng = np.random.default_rng([*self._key, number, 1 + block])
        packs: np.ndarray = rng.permutation(np.concatenate(ranges))
        self._blocks[key] = packs
        if len(self._blocks) > BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return packs

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_starts": {}, "_blocks": OrderedDict()}


class Interleaving:
    """A sequence that takes `counts[i]` things from stream i, each stream spread evenly over the whole of it.

    Thing j of a stream of n is due at (j + 1/2) / n of the way. With counts (3, 1) the dues are 1/6, 3/6, 5/6 and 1/2:
    the sequence is 0, 0, 1, 0, a tie going to the earlier stream. Any stretch is found without what comes before.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = np.array(counts, np.int64)

    def taken(self, place: int) -> np.ndarray:
        """Return how many things of each stream stand before a place; int64 (num_streams,)."""
        low, high = 0.0, 1.0
        for _ in range(64):
            middle = (low + high) / 2
            if self._due_before(middle).sum() <= place:
                low = middle
            else:
                high = middle
        taken = self._due_before(low)
        for stream in self._next(taken, place - int(taken.sum())):
            taken[stream] += 1
        return taken

    def stretch(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the streams of places [start, stop), and how many things of each stream stand before `start`."""
        taken = self.taken(start)
        return np.array(self._next(taken, stop - start), np.int64), taken

    def _due_before(self, share: float) -> np.ndarray:
        """Return how many things of each stream are due before a share of the way, as `_next` compares dues."""
        found: np.ndarray = np.clip(np.ceil(share * self.counts - 0.5), 0, self.counts).astype(np.int64)
        found -= (found > 0) & ((found - 0.5) / self.counts >= share)  # or rounding would make order and counts differ
        found += (found < self.counts) & ((found + 0.5) / self.counts < share)
        return found

    def _next(self, taken: np.ndarray, number: int) -> list[int]:
        """Return the streams of the next things after those taken."""
        if number <= 0:
            return []
        streams, dues = [], []
        for stream, count in enumerate(self.counts.tolist()):
            more = np.arange(taken[stream], min(count, taken[stream] + number))
            streams.append(np.full(len(more), stream))
            dues.append((more + 0.5) / count)
        order = np.argsort(np.concatenate(dues), kind="stable")[:number]
        return [int(stream) for stream in np.concatenate(streams)[order]]


class PackSequence:
    """The packs of every epoch, in order, of one stream or of several that are mixed.

    Args:
        streams: By source; under the name "" where all are one.
        counts: Packs that an epoch takes of each stream.
    """

    def __init__(self, streams: Mapping[str, ShardStream], counts: Sequence[int]) -> None:
        self._streams, self._mixing = list(streams.values()), Interleaving(counts)
        self.num_packs = int(sum(counts))
        "Packs of an epoch."

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return packs [start, stop) of an epoch; int64."""
        if len(self._streams) == 1:
            return self._streams[0].take(epoch * self.num_packs + start, epoch * self.num_packs + stop)
        order, taken = self._mixing.stretch(start, stop)
        packs = np.empty(len(order), np.int64)
        for number, stream in enumerate(self._streams):
            mine = order == number
            first = epoch * int(self._mixing.counts[number]) + int(taken[number])
            packs[mine] = stream.take(first, first + int(mine.sum()))
        return packs
