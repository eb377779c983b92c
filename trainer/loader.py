"""Batches of a dataset in training order, ready before the step asks.

Which packs make a step comes from `shards.ordering` and does not depend on the number of processes; the state is a few
integers, so any step of any epoch starts at once. `trainer.feeding.feed` turns packs into batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shards import Dataset, PackError
from shards.errors import OptionError
from shards.ordering.block_order import SHUFFLE_BLOCK_SHARDS, BlockOrder
from shards.ordering.of_dataset import order_of
from shards.ordering.step_order import BLOCK_ORDERS, StepOrder
from shards.tables.index import Index
from trainer.batch import Batch
from trainer.feeding.feed import SourceNumbers, feed

if TYPE_CHECKING:
    from trainer.feeding.redraw import RedrawnPacks

STATE_VERSION = 1


class Step(NamedTuple):
    """One optimizer step as one process sees it, known before it runs."""

    batches: list[np.ndarray]
    "Pack ids of each micro-batch of this process; ~id is a pack without targets that only fills up the step."
    num_tokens: int
    "Tokens of the step, over all processes."
    num_targets: int
    "Targets of the step, over all processes."
    divisor: float
    "What the summed loss of the step is divided by: targets or the sum of their weights, or segments that have one."
    straggler: float
    "Cost of the slowest process over the mean."
    source_tokens: np.ndarray
    "Tokens of the step by source, over all processes; int64, in the order of `PackLoader.sources`."
    source_targets: np.ndarray
    "The same of targets."


class PackLoader:
    """Iterate the micro-batches of one process.

    `for batch in loader` runs to the end of the current epoch; the next loop runs the next epoch. Iterating costs no
    communication. `len(loader)` counts the micro-batches of a whole epoch, the same on every process.

    Args:
        dataset: What to read.
        tokens_per_batch: Tokens in a micro-batch, at least `dataset.seq_len`; None for one pack.
        packs_per_step: Packs in a step over all processes; None for one micro-batch on each.
        seed: Seed of the order.
        order: "shuffled" or "cost-grouped"; "block-shuffled" or "block-cost-grouped" for very large datasets, whose
            packs are shuffled inside blocks of shards.
        shuffle_block_shards: Shards in such a block.
        last_step: "drop" or "pad".
        largest_first: Begin each epoch with the costliest step.
        mix: (source, weight) pairs; empty for every pack once an epoch.
        mix_by: What the weights count.
        mix_stop: When a mixed epoch ends: "first" source used up, or "longest".
        repack: Draw other packs for every pass over a source, from the segments of each window.
        rank: This process.
        world_size: Number of processes.
        num_nodes: Machines that they run on. Where shards are fetched, in an order of blocks, packs of one shard go to
            one machine, where they can.
        device: Where batches go.
        static_shapes: Fill every batch up to the same length, for compiled models.
        weighting: What `divisor` counts: "token" (targets) or "document" (segments with a target).
        sliding_window: Sliding window of the model, for its attention pairs.

    Raises:
        PackError: A size or a rank does not fit, or a source is unknown.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        tokens_per_batch: int | None = None,
        packs_per_step: int | None = None,
        seed: int = 0,
        order: str = "shuffled",
        last_step: str = "drop",
        shuffle_block_shards: int = SHUFFLE_BLOCK_SHARDS,
        largest_first: bool = False,
        mix: tuple[tuple[str, float], ...] = (),
        mix_by: str = "tokens",
        mix_stop: str = "first",
        repack: bool = False,
        rank: int = 0,
        world_size: int = 1,
        num_nodes: int = 1,
        device: torch.device | str = "cpu",
        static_shapes: bool = False,
        weighting: str = "token",
        sliding_window: int | None = None,
    ) -> None:
        if world_size < 1:
            raise OptionError("world_size", f"{world_size}; expected at least 1.")
        if not 0 <= rank < world_size:
            raise OptionError("rank", f"{rank}; expected 0 to {world_size - 1}, since world_size is {world_size}.")
        if packs_per_step is not None and packs_per_step < 1:
            raise OptionError("packs_per_step", f"{packs_per_step}; expected at least 1.")
        self.dataset, self.rank, self.world_size = dataset, rank, world_size
        self.device, self.weighting, self.sliding_window = torch.device(device), weighting, sliding_window
        self.tokens_per_batch = dataset.seq_len if tokens_per_batch is None else tokens_per_batch
        self.static_shapes = static_shapes
        if self.tokens_per_batch < dataset.seq_len:
            raise OptionError(
                "tokens_per_batch",
                f"{self.tokens_per_batch}; expected at least one pack of {dataset.seq_len} tokens.",
            )
        smallest = self.tokens_per_batch // dataset.seq_len * world_size
        self.packs_per_step = smallest if packs_per_step is None else packs_per_step
        if self.packs_per_step % smallest:
            raise OptionError(
                "packs_per_step",
                f"{self.packs_per_step}; expected a multiple of {smallest} "
                f"(packs in a micro-batch: {smallest // world_size}, processes: {world_size}).",
            )
        self._num_nodes = num_nodes if dataset.mirror is not None else 1
        self.batches_per_step = self.packs_per_step // smallest  # of this process
        self.rectangles = False
        "Whether to plan each batch's rectangles, for models with layers that run on them."
        if repack and order in BLOCK_ORDERS:
            raise OptionError(
                "repack", f"{order} follows the shards as they are. Set the `order` shuffled or cost-grouped."
            )
        self.drawn: RedrawnPacks | None = None
        "Packs that are drawn anew in each pass; None where those of the dataset are read."
        if repack:
            from trainer.feeding.redraw import RedrawnPacks  # compiled code, which no other run needs

            self.drawn = RedrawnPacks(dataset, seed)
        self.sources = SourceNumbers(dataset.sources if self.drawn is None else self.drawn.sources)
        self.by_source = False
        "Whether batches say which source each token comes from (`sources`)."
        self.steps_taken = 0
        "Steps handed out whole, over all epochs."
        bucketed = dataset.packer == "bucketed"
        chosen: dict[str, Any] = {
            "seed": seed, "order": order, "last_step": last_step, "mix": mix, "mix_by": mix_by, "mix_stop": mix_stop,
        }  # fmt: skip
        self.order: StepOrder | BlockOrder = order_of(
            dataset, packs_per_step=self.packs_per_step, tokens_per_batch=self.tokens_per_batch,
            shuffle_block_shards=shuffle_block_shards, largest_first=largest_first, drawn=self.drawn, **chosen,
        )  # fmt: skip
        "Which packs make which step."
        if order in BLOCK_ORDERS:
            chosen["shuffle_block_shards"] = shuffle_block_shards
        else:
            chosen["largest_first"] = largest_first
        self.steps_per_epoch = self.order.steps_per_epoch
        self._fixed = chosen | {
            "mix": [list(pair) for pair in mix],
            "repack": repack,
            "packs_per_step": self.packs_per_step,
            # the size of rectangles is part of the order
            "tokens_per_batch": self.tokens_per_batch if bucketed else None,
        }

    def step_at(self, number: int) -> Step:
        """Return step `number` of the run, counted from 0 over all epochs, as this process sees it."""
        place = divmod(number, self.steps_per_epoch)
        if isinstance(self.order, BlockOrder):
            ranks = self.order.batches(*place, self.world_size, self._num_nodes)
        else:
            ranks = self.order.batches(*place, self.world_size)
        packs = np.concatenate([batch for rank in ranks for batch in rank])
        work = np.array([sum(self.order.costs_of(batch).sum() for batch in rank) for rank in ranks])
        index = self.dataset.index.take(packs) if self.drawn is None else self.drawn.take(packs)
        targets, segments = int(index.num_targets.sum()), int(index.num_target_segments.sum())
        source_tokens, source_targets = (
            np.bincount(self.sources.of(packs), column, len(self.sources.names)).astype(np.int64)
            for column in (index.num_tokens, index.num_targets)
        )
        return Step(
            batches=ranks[self.rank],
            num_tokens=int(index.num_tokens.sum()),
            num_targets=targets,
            divisor=self._divisor(index, targets, segments),
            straggler=float(work.max() / work.mean()),
            source_tokens=source_tokens,
            source_targets=source_targets,
        )

    def _divisor(self, index: Index, targets: int, segments: int) -> float:
        if self.weighting == "document":
            return max(1, segments)
        return max(1, targets) if index.weight_sum is None else float(index.weight_sum.sum()) or 1.0

    def packs_of(self, number: int) -> np.ndarray:
        """Return the packs of step `number` over all processes; int64."""
        return self.order.step_packs(*divmod(number, self.steps_per_epoch))

    def __len__(self) -> int:
        return self.steps_per_epoch * self.batches_per_step

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.steps_taken // self.steps_per_epoch
        return self._iterate(range(self.steps_taken, (epoch + 1) * self.steps_per_epoch))

    def forever(self) -> Generator[Batch]:
        """Iterate on through epoch after epoch."""
        return self._iterate(itertools.count(self.steps_taken))

    def _iterate(self, numbers: Iterable[int]) -> Generator[Batch]:
        def batches() -> Iterator[tuple[np.ndarray, tuple[Step, int | None]]]:
            for number in numbers:
                step = self.step_at(number)
                for i, rows in enumerate(step.batches):
                    yield rows, (step, number + 1 if i + 1 == len(step.batches) else None)

        for batch, (step, done) in feed(
            self.dataset, batches(), self.tokens_per_batch, self.device, self.static_shapes, self.sliding_window,
            self.rectangles, self.sources if self.by_source else None, self.drawn,
        ):  # fmt: skip
            batch["step"] = step
            if done is not None:
                self.steps_taken = done
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: whole steps handed out, whatever is prepared ahead."""
        return self.state_at(self.steps_taken)

    def state_at(self, steps_taken: int) -> dict[str, Any]:
        """Return the state after so many steps, as JSON-able values."""
        epoch, step = divmod(steps_taken, self.steps_per_epoch)
        return {
            "version": STATE_VERSION,
            "dataset_id": self.dataset.dataset_id,
            "epoch": epoch,
            "step": step,
            **self._fixed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another loader stood; the number of processes may differ.

        Raises:
            PackError: It is no state of a loader, is of another dataset, or of other settings that change the order.
        """
        if isinstance(state, dict):
            state = {"repack": False} | state  # earlier versions did not know it
        if not isinstance(state, dict) or (missing := self.state_at(0).keys() - state.keys()):
            what = f"lacks {', '.join(sorted(missing))}" if isinstance(state, dict) else f"is {type(state).__name__}"
            raise PackError(f"not a state of PackLoader: it {what}. Pass what state_dict() returned.")
        for key, value in self.state_at(0).items():
            if key not in ("epoch", "step") and state.get(key) != value:
                raise PackError(
                    f"{self.dataset.path}: the checkpoint has {key} {state.get(key)!r}, this run has {value!r}; other "
                    "packs would come. Resume with the same dataset and settings, or start a new run."
                )
        for key, limit in (("epoch", None), ("step", self.steps_per_epoch)):
            value = state[key]
            if type(value) is not int or value < 0 or (limit is not None and value >= limit):
                upper = "or more" if limit is None else f"to {limit - 1}"
                raise PackError(
                    f"not a state of PackLoader: its {key} is {value!r}; expected a whole number, 0 {upper}. "
                    "Pass what state_dict() returned."
                )
        self.steps_taken = state["epoch"] * self.steps_per_epoch + state["step"]
