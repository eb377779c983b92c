"""Which packs make which step, in plain numpy: a pure function of the index, the settings, the epoch and the step.

The order of an epoch is computed once and knows no ranks: step s holds the same packs whatever the world size, so a
checkpoint is an epoch and a number of steps. `balance` then spreads the packs of one step over ranks and micro-batches
so that all take equally long (64 ranks, 8 micro-batches on each: slowest / mean about 1.01, 1.05 to 1.26 without).
`cost-grouped` fills steps with packs of like cost, for one micro-batch a rank (1.001 against 1.2 to 1.8). Mixed sources
follow one largest-deficit sequence per epoch; each source's own permutations run on where the last epoch stopped.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shards.cost import attention_pairs, pack_costs
from shards.errors import OptionError
from shards.tables.index import Index

ORDERS = ("shuffled", "cost-grouped")
BLOCK_ORDERS = ("block-shuffled", "block-cost-grouped")
LAST_STEPS = ("drop", "pad")
MIX_BY = ("tokens", "targets", "packs")
MIX_STOPS = ("first", "longest")


def balance(costs: np.ndarray, world_size: int, micro_batches: int, packs_per_batch: int = 1) -> np.ndarray:
    """Spread the packs of a step over ranks and micro-batches so that all ranks take equally long.

    Packs of like cost land in the same micro-batch on all ranks; of each such row, the rank with least work so far gets
    the most costly pack.

    Args:
        costs: Cost per pack; shape (..., world_size * micro_batches * packs_per_batch), steps in front.
        world_size: Number of ranks.
        micro_batches: Micro-batches of each rank.
        packs_per_batch: Packs in a micro-batch.

    Returns:
        Positions in the step, every one once; int64, shape (..., world_size, micro_batches, packs_per_batch).
    """
    lead, rows = costs.shape[:-1], micro_batches * packs_per_batch
    by_cost = np.argsort(-costs, axis=-1, kind="stable").reshape(*lead, rows, world_size)
    work = np.zeros((*lead, world_size))
    balanced = np.empty((*lead, world_size, rows), np.int64)
    for row in range(rows):
        packs = by_cost[..., row, :]
        ranks = np.argsort(work, axis=-1, kind="stable")
        np.put_along_axis(balanced[..., row], ranks, packs, -1)
        work += np.take_along_axis(costs, balanced[..., row], -1)
    balanced = balanced.reshape(*lead, world_size, packs_per_batch, micro_batches)
    balanced[..., 1::2, :] = balanced[..., 1::2, ::-1]  # back and forth, so that micro-batches come out alike too
    return np.swapaxes(balanced, -1, -2)


def straggler_factor(costs: np.ndarray, world_size: int, packs_per_batch: int = 1) -> float:
    """Mean over steps of the slowest rank's cost / the mean rank's, after `balance`; 1.0 is perfect.

    Args:
        costs: Cost of each pack of each step; shape (num_steps, packs_per_step).
        world_size: Number of ranks.
        packs_per_batch: Packs in a micro-batch.
    """
    batches = costs.shape[1] // (world_size * packs_per_batch)
    balanced = balance(costs, world_size, batches, packs_per_batch).reshape(len(costs), -1)
    work = np.take_along_axis(costs, balanced, -1).reshape(len(costs), world_size, -1).sum(-1)
    return float((work.max(-1) / work.mean(-1)).mean())


class StepOrder:
    """The steps of every epoch.

    Args:
        index: Figures per pack.
        packs_per_step: Packs in a step, over all ranks.
        packs_per_batch: Packs in a micro-batch; divides `packs_per_step`.
        seed: Seed of every permutation, not negative.
        order: One of `ORDERS`.
        last_step: One of `LAST_STEPS`: leave out the packs that fill no step (others every epoch), or repeat some.
        padded_len: Of a bucketed dataset, the padded length of each row, in tokens. A micro-batch is then a rectangle
            of rows of one padded length, and a step has `packs_per_step / packs_per_batch` of them.
        tokens_per_batch: Largest rectangle, in tokens; with `padded_len` only.
        sources: (name, first pack, stop pack) of every stretch of packs from one source; with `mix` only.
        mix: (source, weight) pairs; empty for every pack once an epoch. Sources that are not named stay out.
        mix_by: One of `MIX_BY`, what the weights count.
        mix_stop: One of `MIX_STOPS`: an epoch ends when the first source is used up, or when all are.
        largest_first: Whether each epoch begins with the step that holds the costliest unit: out of memory at once.
        drawn_anew: Whether each pass over the packs of a source has other packs. Pass `k` then has the ids
            `k * num_packs + pack`, each with the cost of that pack in the index.

    Raises:
        OptionError: A setting is unknown or does not fit, or an epoch has no step.
    """

    def __init__(
        self,
        index: Index,
        *,
        packs_per_step: int,
        packs_per_batch: int = 1,
        seed: int = 0,
        order: str = "shuffled",
        last_step: str = "drop",
        padded_len: np.ndarray | None = None,
        tokens_per_batch: int = 0,
        sources: Sequence[tuple[str, int, int]] = (),
        mix: Sequence[tuple[str, float]] = (),
        mix_by: str = "tokens",
        mix_stop: str = "first",
        largest_first: bool = False,
        drawn_anew: bool = False,
    ) -> None:
        check_choices(order=(order, ORDERS), last_step=(last_step, LAST_STEPS))
        if packs_per_step < 1 or packs_per_step % packs_per_batch:
            raise OptionError("packs_per_step", f"{packs_per_step}; expected a multiple of {packs_per_batch}.")
        if mix and (order != "shuffled" or padded_len is not None):
            raise OptionError(
                "mix",
                "gives one sequence of sources, which cost-grouped or bucketed steps would break; expected shuffled "
                "steps of a packed dataset. Use the order shuffled and a dataset that is packed.",
            )
        self._seed, self._by_cost, self._largest_first = seed, order == "cost-grouped", largest_first
        self._padded_len, self._tokens_per_batch = padded_len, tokens_per_batch
        self._ids_per_pass = len(index) if drawn_anew else 0
        self._mix = _Mix(index, sources, mix, mix_by, mix_stop, seed, self._ids_per_pass) if mix else None
        self.passes: dict[str, float] = self._mix.passes if self._mix else {}
        "By mixed source, how often an epoch serves each of its packs on average."
        self.packs_per_batch = packs_per_batch if padded_len is None else 1
        "Units (packs, or rectangles of bucketed rows) in a micro-batch."
        self.units_per_step = packs_per_step if padded_len is None else packs_per_step // packs_per_batch
        "Units in a step."
        tokens, pairs = index.num_tokens, index.attention_pairs
        if padded_len is not None:
            tokens, pairs = padded_len, attention_pairs(padded_len)
        self.costs = pack_costs(tokens, pairs)
        "Cost of each pack, padding counted; float64, shape (num_packs,)."
        self._epochs: dict[int, _Epoch] = {}
        num_units = self._mix.num_packs if self._mix else len(self._units(0)[1]) - 1
        whole, over = divmod(num_units, self.units_per_step)
        self.steps_per_epoch = whole + (last_step == "pad" and over > 0)
        "Steps in an epoch, the same in every one."
        self.dropped = over if last_step == "drop" else 0
        "Units that an epoch leaves out because they fill no step; others each time."
        self.repeated = self.steps_per_epoch * self.units_per_step - num_units + self.dropped
        "Units that an epoch serves again to fill its last step."
        if self.steps_per_epoch == 0:
            unit = "packs" if padded_len is None else "rectangles of padded rows"
            raise OptionError(
                "packs_per_step",
                f"a step takes {self.units_per_step} {unit}, an epoch has {num_units}; expected at least one step. "
                "Use a smaller step, pad the last step, or use more data.",
            )

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_epochs": {}}

    def costs_of(self, packs: np.ndarray) -> np.ndarray:
        """Return the cost of some packs, padding counted; float64, same shape."""
        costs: np.ndarray = self.costs[packs % len(self.costs)]
        return costs

    def step_packs(self, epoch: int, step: int) -> np.ndarray:
        """Return the packs of a step, in the order of the epoch, whatever the world size; int64."""
        order = self._epoch(epoch)
        return order.packs_of(order.steps[step])

    def steps_of(self, epoch: int, packs: np.ndarray) -> np.ndarray:
        """Return the steps of an epoch that hold any of some packs; int64, ascending."""
        order = self._epoch(epoch)
        places = np.flatnonzero(np.isin(order.packs, packs))
        units = np.searchsorted(order.starts, places, side="right") - 1
        steps: np.ndarray = np.flatnonzero(np.isin(order.steps, units).any(axis=1))
        return steps

    def passes_of(self, epoch: int) -> list[int]:
        """Return which passes the packs of an epoch are of, where they are drawn anew; ascending."""
        passes: list[int] = np.unique(self._epoch(epoch).packs // len(self.costs)).tolist()
        return passes

    def batches(self, epoch: int, step: int, world_size: int) -> list[list[np.ndarray]]:
        """Return, for each rank, the packs of each of its micro-batches, balanced so that all ranks take equally long.

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
        order = self._epoch(epoch)
        units = order.steps[step]
        balanced = balance(order.costs[units], world_size, len(units) // smallest, self.packs_per_batch)
        return [[order.packs_of(units[batch]) for batch in rank] for rank in balanced]

    def straggler_factor(self, epoch: int, world_size: int, max_steps: int = 1000) -> float:
        """Return `straggler_factor` of the first `max_steps` steps of an epoch."""
        order = self._epoch(epoch)
        return straggler_factor(order.costs[order.steps[:max_steps]], world_size, self.packs_per_batch)

    def _epoch(self, epoch: int) -> "_Epoch":
        if epoch not in self._epochs:
            # A prefetching loader asks for the next epoch before the last is over: keep one more, not all.
            kept = {number: order for number, order in self._epochs.items() if number == epoch - 1}
            self._epochs = {**kept, epoch: self._arrange(epoch)}
        return self._epochs[epoch]

    def _arrange(self, epoch: int) -> "_Epoch":
        packs, starts = self._units(epoch)
        costs = np.add.reduceat(self.costs_of(packs), starts[:-1])
        rng = np.random.default_rng([self._seed, 0, epoch])
        units = np.arange(len(costs)) if self._mix else rng.permutation(len(costs))
        size, num_steps = self.units_per_step, self.steps_per_epoch
        units = np.resize(units, num_steps * size) if self.repeated else units[: num_steps * size]
        if self._by_cost:
            units = units[np.argsort(costs[units], kind="stable")]
        steps = units.reshape(num_steps, size)
        if self._by_cost:
            steps = steps[rng.permutation(num_steps)]
        if self._largest_first:
            first = int(costs[steps].max(axis=1).argmax())
            steps[[0, first]] = steps[[first, 0]]
        return _Epoch(packs, starts, costs, steps)

    def _units(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Packs of an epoch, and where each unit starts among them: packs one by one, or rectangles in random cuts."""
        if self._padded_len is None:
            every = epoch * self._ids_per_pass + np.arange(len(self.costs))
            packs = self._mix.sequence(epoch) if self._mix else every
            return packs, np.arange(len(packs) + 1)
        packs = np.random.default_rng([self._seed, 1, epoch]).permutation(len(self.costs))
        packs = packs[np.argsort(self._padded_len[packs], kind="stable")]
        lengths, first, counts = np.unique(self._padded_len[packs], return_index=True, return_counts=True)
        starts = [
            np.arange(begin, begin + count, max(1, self._tokens_per_batch // length))
            for length, begin, count in zip(lengths.tolist(), first.tolist(), counts.tolist(), strict=True)
        ]
        return packs, np.concatenate([*starts, [len(packs)]])


class _Epoch(NamedTuple):
    """The order of one epoch."""

    packs: np.ndarray
    starts: np.ndarray
    costs: np.ndarray
    steps: np.ndarray
    "Units by step; int64, shape (steps_per_epoch, units_per_step)."

    def packs_of(self, units: np.ndarray) -> np.ndarray:
        if len(self.starts) == len(self.packs) + 1:
            packs: np.ndarray = self.packs[units]
            return packs
        return np.concatenate([self.packs[self.starts[unit] : self.starts[unit + 1]] for unit in units])


class _Mix:
    """One sequence per epoch in which every source keeps its share at every point.

    Each source takes part with a fixed number of packs, drawn from an endless row of its own permutations.
    """

    def __init__(
        self,
        index: Index,
        sources: Sequence[tuple[str, int, int]],
        mix: Sequence[tuple[str, float]],
        by: str,
        stop: str,
        seed: int,
        ids_per_pass: int,
    ) -> None:
        check_choices(mix_by=(by, MIX_BY), mix_stop=(stop, MIX_STOPS))
        known = list(dict.fromkeys(name for name, _, _ in sources))
        self._seed, self._ids_per_pass, self._packs, self._amounts, weights = seed, ids_per_pass, [], [], []
        self._streams: list[int] = []
        per_pack = {"tokens": index.num_tokens, "targets": index.num_targets}.get(by)
        for name, weight in mix:
            if name not in known or not 0 < weight < np.inf:
                fault = "a finite weight above 0" if name in known else f"one of the sources {', '.join(known)}"
                raise OptionError("mix", f"{name}={weight:g}; expected {fault}.")
            packs = np.concatenate([np.arange(start, end) for source, start, end in sources if source == name])
            amounts = np.ones(len(packs), np.int64) if per_pack is None else per_pack[packs].astype(np.int64)
            if amounts.sum() == 0:
                raise OptionError("mix", f"source {name} has no {by}. Leave it out, or weigh by something it has.")
            self._packs.append(packs)
            self._amounts.append(amounts)
            self._streams.append(1 + known.index(name))
            weights.append(weight)
        self._weights = np.array(weights) / sum(weights)
        totals = np.array([amounts.sum() for amounts in self._amounts])
        lengths = totals / self._weights  # what the whole mix amounts to when this source is used up
        share = (lengths.min() if stop == "first" else lengths.max()) / lengths
        self._counts = [max(1, round(len(p) * s)) for p, s in zip(self._packs, share.tolist(), strict=True)]
        self.num_packs = sum(self._counts)
        self.passes = {
            name: count / len(packs) for (name, _), count, packs in zip(mix, self._counts, self._packs, strict=True)
        }

    def sequence(self, epoch: int) -> np.ndarray:
        """Return the packs of an epoch: each next one from the source that would else fall furthest behind."""
        packs, due = [], []
        for source, count in enumerate(self._counts):
            chosen = self._draw(source, epoch * count, count)
            amounts = self._amounts[source][chosen]
            passes = np.arange(epoch * count, (epoch + 1) * count) // len(self._packs[source])
            packs.append(passes * self._ids_per_pass + self._packs[source][chosen])
            # Halfway through a pack, the mix as a whole should have served this much.
            due.append((np.cumsum(amounts) - amounts / 2) / self._weights[source])
        return np.concatenate(packs)[np.argsort(np.concatenate(due), kind="stable")]

    def _draw(self, source: int, start: int, count: int) -> np.ndarray:
        """Items [start, start + count) of a source's endless row of permutations."""
        size = len(self._packs[source])
        first, last = start // size, (start + count - 1) // size
        passes = [
            np.random.default_rng([self._seed, 1 + self._streams[source], number]).permutation(size)
            for number in range(first, last + 1)
        ]
        return np.concatenate(passes)[start - first * size :][:count]


def check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    """Raise OptionError where a value, given with the allowed ones under its argument's name, is none of them."""
    for name, (value, known) in choices.items():
        if value not in known:
            raise OptionError(name, f"{value!r}; expected one of {', '.join(known)}.")
