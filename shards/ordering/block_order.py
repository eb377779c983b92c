"""The steps of every epoch, shard block by shard block: `StepOrder` for datasets that are fetched or very large.

The same steps for any number of ranks, found from (seed, epoch, step) alone. Only the index rows of the packs at hand
are read. With the order `block-cost-grouped` each step of a run, as long as about one block, is filled with packs of
like cost, and the steps of a run come in random order.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from shards.cost import pack_costs
from shards.counts import Counts
from shards.errors import OptionError
from shards.ordering.blocks import PackSequence, ShardStream
from shards.ordering.nodes import deal_to_nodes
from shards.ordering.step_order import (
    BLOCK_ORDERS,
    LAST_STEPS,
    MIX_BY,
    MIX_STOPS,
    balance,
    check_choices,
    straggler_factor,
)
from shards.tables.index import Index
from shards.tables.shard_list import ShardList

SHUFFLE_BLOCK_SHARDS = 64
GROUPS_KEPT = 2


def meeting_share(packs: np.ndarray, block_shards: int = SHUFFLE_BLOCK_SHARDS) -> float:
    """Return the share of pairs of packs that lie in one block of an epoch: 1.0 is a full shuffle.

    Args:
        packs: Packs in each shard; integers, (num_shards,).
        block_shards: Shards in a block.

    Example:
        100 shards of 10 packs in blocks of 10: a pack meets 99 of the 999 others.
    """
    if block_shards >= len(packs):
        return 1.0
    total = float(packs.sum())
    block = block_shards * total / len(packs)
    return max(0.0, (block - 1) / max(1.0, total - 1))


class BlockOrder:
    """The steps of every epoch.

    Args:
        shards: The shard list.
        index: Figures per pack.
        counts: Balance sheet of each source, in the order of the shard list's sources.
        packs_per_step: Packs in a step, over all ranks.
        packs_per_batch: Packs in a micro-batch; divides `packs_per_step`.
        seed: Seed of every permutation, not negative.
        order: One of `BLOCK_ORDERS`.
        last_step: One of `LAST_STEPS`: leave out the packs that fill no step (others every epoch), or repeat some.
        block_shards: Shards whose packs are shuffled together.
        mix: (source, weight) pairs; empty for every pack once an epoch. Sources that are not named stay out.
        mix_by: One of `MIX_BY`, what the weights count, by the mean of each source.
        mix_stop: One of `MIX_STOPS`: an epoch ends when the first source is used up, or when all are.

    Raises:
        OptionError: A setting is unknown or does not fit, or an epoch has no step.
    """

    def __init__(
        self,
        shards: ShardList,
        index: Index,
        counts: Sequence[Counts],
        *,
        packs_per_step: int,
        packs_per_batch: int = 1,
        seed: int = 0,
        order: str = "block-shuffled",
        last_step: str = "drop",
        block_shards: int = SHUFFLE_BLOCK_SHARDS,
        mix: Sequence[tuple[str, float]] = (),
        mix_by: str = "tokens",
        mix_stop: str = "first",
    ) -> None:
        check_choices(order=(order, BLOCK_ORDERS), last_step=(last_step, LAST_STEPS))
        check_choices(mix_by=(mix_by, MIX_BY), mix_stop=(mix_stop, MIX_STOPS))
        if block_shards < 1:
            raise OptionError("shuffle_block_shards", f"{block_shards}; expected at least 1.")
        if packs_per_step < 1 or packs_per_step % packs_per_batch:
            raise OptionError("packs_per_step", f"{packs_per_step}; expected a multiple of {packs_per_batch}.")
        if mix and order != "block-shuffled":
            raise OptionError("mix", "gives one sequence of sources, which steps of like cost would break.")
        self._index, self._seed, self._by_cost = index, seed, order == "block-cost-grouped"
        self._shards, self._block_shards = shards, block_shards
        self._sequence, self.passes = self._arrange(counts, mix, mix_by, mix_stop)
        self.packs_per_batch, self.units_per_step = packs_per_batch, packs_per_step
        whole, over = divmod(self._sequence.num_packs, packs_per_step)
        self.steps_per_epoch = whole + (last_step == "pad" and over > 0)
        "Steps in an epoch, the same in every one."
        self.dropped = over if last_step == "drop" else 0
        "Packs that an epoch leaves out because they fill no step; others each time."
        self.repeated = self.steps_per_epoch * packs_per_step - self._sequence.num_packs + self.dropped
        "Packs that an epoch serves again to fill its last step."
        self._groups: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        if self.steps_per_epoch == 0:
            raise OptionError(
                "packs_per_step",
                f"a step takes {packs_per_step} packs, an epoch has {self._sequence.num_packs}; expected at least one "
                "step. Use a smaller step, pad the last step, or use more data.",
            )

    def _arrange(
        self, counts: Sequence[Counts], mix: Sequence[tuple[str, float]], mix_by: str, mix_stop: str
    ) -> tuple[PackSequence, dict[str, float]]:
        columns = self._shards.columns
        if not mix:
            stream = ShardStream(columns["first_pack"], columns["packs"], (self._seed, 0), self._block_shards)
            return PackSequence({"": stream}, [stream.num_packs]), {}
        known, amounts, weights = self._shards.sources, [], []
        streams = {}
        for name, weight in mix:
            if name not in known or not 0 < weight < np.inf:
                fault = "a finite weight above 0" if name in known else f"one of the sources {', '.join(known)}"
                raise OptionError("mix", f"{name}={weight:g}; expected {fault}.")
            number = known.index(name)
            amount = _amount(counts[number], mix_by)
            if not amount:
                raise OptionError("mix", f"source {name} has no {mix_by}. Leave it out, or weigh by something it has.")
            mine = np.flatnonzero(columns["source"] == number).astype(np.int32)
            first, packs = columns["first_pack"][mine], columns["packs"][mine]
            streams[name] = ShardStream(first, packs, (self._seed, 1 + number), self._block_shards)
            amounts.append(amount)
            weights.append(weight)
        lengths = np.array(amounts) / (np.array(weights) / sum(weights))  # of the whole mix as this source is used up
        share = (lengths.min() if mix_stop == "first" else lengths.max()) / lengths
        taken = [
            max(1, round(stream.num_packs * part))
            for stream, part in zip(streams.values(), share.tolist(), strict=True)
        ]
        passes = {name: count / streams[name].num_packs for name, count in zip(streams, taken, strict=True)}
        return PackSequence(streams, taken), passes

    def costs_of(self, packs: np.ndarray) -> np.ndarray:
        """Return the cost of some packs, reading no other row of the index; float64, same shape."""
        return pack_costs(self._index.num_tokens[packs], self._index.attention_pairs[packs])

    def step_packs(self, epoch: int, step: int) -> np.ndarray:
        """Return the packs of a step, in the order of the epoch, whatever the world size; int64."""
        size, total = self.units_per_step, self._sequence.num_packs
        if self._by_cost:
            return self._group_of(epoch, step)
        start = step * size
        packs = self._sequence.take(epoch, start, min(total, start + size))
        if len(packs) == size:
            return packs
        first = self._sequence.take(epoch, 0, min(total, size - len(packs)))  # the last step is filled from the first
        return np.resize(np.concatenate([packs, first]), size)

    def steps_of(self, epoch: int, packs: np.ndarray) -> np.ndarray:
        """Return the steps of an epoch that hold any of some packs; int64, ascending."""
        steps = [step for step in range(self.steps_per_epoch) if np.isin(self.step_packs(epoch, step), packs).any()]
        return np.array(steps, np.int64)

    def batches(self, epoch: int, step: int, world_size: int, num_nodes: int = 1) -> list[list[np.ndarray]]:
        """Return, for each rank, the packs of each of its micro-batches, balanced so that all ranks take equally long.

        Args:
            epoch: Of the step.
            step: Its number there.
            world_size: Number of ranks.
            num_nodes: Nodes that they run on, as many ranks on each, one node's after another's. Packs of one shard go
                to one node, where it can be, and the ranks of a node are balanced among themselves.

        Raises:
            OptionError: The step does not divide into micro-batches for so many ranks.
        """
        smallest = world_size * self.packs_per_batch
        if self.units_per_step % smallest:
            raise OptionError(
                "packs_per_step",
                f"a step of {self.units_per_step} does not spread over {world_size} processes "
                f"with {self.packs_per_batch} in a micro-batch; expected a multiple of {smallest}.",
            )
        packs = self.step_packs(epoch, step)
        shards = np.searchsorted(self._shards.columns["first_pack"], packs, side="right") - 1
        ranks: list[list[np.ndarray]] = []
        for dealt in deal_to_nodes(shards, num_nodes):
            mine, count = packs[dealt], len(packs) // smallest
            balanced = balance(self.costs_of(mine), world_size // num_nodes, count, self.packs_per_batch)
            ranks += [[mine[batch] for batch in rank] for rank in balanced]
        return ranks

    def straggler_factor(self, epoch: int, world_size: int, max_steps: int = 1000) -> float:
        """Return `straggler_factor` of the first `max_steps` steps of an epoch."""
        steps = range(min(max_steps, self.steps_per_epoch))
        costs = np.stack([self.costs_of(self.step_packs(epoch, step)) for step in steps])
        return straggler_factor(costs, world_size, self.packs_per_batch)

    def _group_of(self, epoch: int, step: int) -> np.ndarray:
        """Return a step of packs of like cost: steps are grouped in runs that take about one block."""
        size, shards = self.units_per_step, len(self._shards)
        per_block = self._sequence.num_packs * min(self._block_shards, shards) // shards
        run = max(1, per_block // size)
        key = (epoch, step // run)
        if key not in self._groups:
            first = key[1] * run
            stop = min(first + run, self.steps_per_epoch)
            total = self._sequence.num_packs
            packs = self._sequence.take(epoch, first * size, min(total, stop * size))
            if len(packs) < (stop - first) * size:
                again = self._sequence.take(epoch, 0, min(total, size))
                packs = np.resize(np.concatenate([packs, again]), (stop - first) * size)
            packs = packs[np.argsort(self.costs_of(packs), kind="stable")].reshape(stop - first, size)
            rng = np.random.default_rng([self._seed, 2, epoch, key[1]])
            self._groups[key] = packs[rng.permutation(stop - first)]
            if len(self._groups) > GROUPS_KEPT:
                self._groups.popitem(last=False)
        group: np.ndarray = self._groups[key][step % run]
        return group

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_groups": OrderedDict()}


def _amount(counts: Counts, by: str) -> int:
    """Return what a source amounts to in the unit of a mix."""
    return {"tokens": counts["tokens"]["packed"], "targets": counts["targets"]["packed"], "packs": counts["packs"]}[by]
