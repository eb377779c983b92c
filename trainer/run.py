"""A run: everything the loop holds, built from its configuration in two parts.

`settle` finds out all that can be known without a model, so that settings that do not fit are said at once: datasets,
the place to start from, the order of packs, the number of steps. `load` then makes the model, its optimizer and the
outputs. Where a run starts is one value (`trainer.resume`); nothing here asks whether it is resumed.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shards import Dataset
from shards.cost import ModelCost
from shards.errors import counted
from shards.fetching.mirror import check_blocks
from shards.lock import Lock
from trainer.checks import check_datasets, check_fit
from trainer.config import TrainConfig
from trainer.distributed import Parallel, World, gather, in_turn, layers_of, make_mesh, parallelize
from trainer.loader import PackLoader
from trainer.metrics import Metrics, check_outputs, cost_of
from trainer.model.adapters import add_adapters, freeze
from trainer.model.backends.agreement import agree_on_backend
from trainer.model.liger import unusable_reason
from trainer.model.loading import checkpoint_activations, load_model
from trainer.model.loss import PackedLM
from trainer.optimizer import build_optimizer
from trainer.resume import ResumePoint, claim_directory, find_resume_point
from trainer.samples import Sampler
from trainer.saving.checkpoint import Checkpoints
from trainer.saving.elsewhere import RemoteCheckpoints


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What is known of a run before its model is loaded."""

    config: TrainConfig
    card_config: TrainConfig
    "Settings of the last step, for the model's card: those of before where none is left to take."
    world: World
    dataset: Dataset
    eval_datasets: dict[str, Dataset]
    'By name; a single one without a name is "".'
    checkpoints: Checkpoints
    start: ResumePoint
    loader: PackLoader
    sampler: Sampler | None
    num_steps: int
    notes: list[str]
    "What a person should know, one line each."


@dataclass(kw_only=True)
class Run:
    """Everything that the loop holds."""

    config: TrainConfig
    card_config: TrainConfig
    world: World
    dataset: Dataset
    eval_datasets: dict[str, Dataset]
    'By name; a single one without a name is "".'
    lm: PackedLM
    parallel: Parallel
    optimizer: torch.optim.Optimizer
    loader: PackLoader
    checkpoints: Checkpoints
    metrics: Metrics
    sampler: Sampler | None
    cost: ModelCost
    num_steps: int
    step: int = 0
    loss: float = math.nan
    best: float = math.inf
    eval_loss: float | None = None
    bad_step: torch.Tensor
    "First step whose gradient is not finite, on the device; -1 for none."
    lock: Lock | None = None
    "Of the run directory, on the main process."

    @property
    def model(self) -> Any:
        """The transformers model, with its adapters where it has some."""
        return self.lm.model

    def due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step == self.num_steps or (every is not None and self.step % every == 0)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward runs."""
        on = self.config.dtype == "bf16" and self.config.shard == "none"  # FSDP2 casts by itself
        return torch.autocast(self.world.device.type, torch.bfloat16) if on else nullcontext()


def set_up(config: TrainConfig, world: World) -> Run:
    """Build everything a run needs.

    Raises:
        PackError: Model, dataset, settings and run directory do not fit.
    """
    return load(settle(config, world))


def settle(config: TrainConfig, world: World) -> Settled:
    """Find out what can be known without a model, and claim the run directory.

    Raises:
        PackError: Dataset, settings and run directory do not fit.
    """
    check_outputs(config)
    dataset = config.open_dataset(config.dataset)
    eval_datasets = {name: config.open_dataset(path) for name, path in config.eval_paths().items()}
    check_datasets(dataset, eval_datasets.values(), config.force)
    elsewhere = RemoteCheckpoints(config.checkpoint_url) if config.checkpoint_url else None
    if elsewhere is not None and world.is_main and not config.resume:
        elsewhere.refuse_others()
    checkpoints = Checkpoints(Path(config.out) / "checkpoints", config.keep, world, elsewhere)
    start = find_resume_point(config, checkpoints)
    loader = make_loader(config, world, dataset, config.packs_per_step or start.packs_per_step)
    start.place(loader)
    sampler = make_sampler(config, dataset, loader.tokens_per_batch)
    num_steps = config.steps or max(1, round(config.epochs * loader.steps_per_epoch))
    notes = [*_order_notes(loader), *start.notes(config, num_steps)]
    if config.warmup_steps >= num_steps:
        notes.append(f"warmup_steps {config.warmup_steps}: the run ends with step {num_steps}, before it decays")
    if world.is_main and not start.is_end(num_steps):
        claim_directory(replace(config, packs_per_step=loader.packs_per_step))  # the default depends on the processes
    config, card_config = start.configs(config, num_steps)
    return Settled(
        config=config,
        card_config=card_config,
        world=world,
        dataset=dataset,
        eval_datasets=eval_datasets,
        checkpoints=checkpoints,
        start=start,
        loader=loader,
        sampler=sampler,
        num_steps=num_steps,
        notes=notes,
    )


def load(settled: Settled) -> Run:
    """Load the model, its optimizer and their state, and open the outputs.

    Raises:
        PackError: The model does not fit datasets or settings.
    """
    config, world, start = settled.config, settled.world, settled.start
    mesh = make_mesh(world) if config.shard == "full" else None
    with nullcontext() if mesh is None else in_turn(world):
        lm, cost, notes = build_model(config, world, [settled.dataset, *settled.eval_datasets.values()])
        parallel = parallelize(lm, lm.model, world, mesh, config.dtype)
    if config.attention == "auto" and lm.backend is not None:
        lm.backend, lines = agree_on_backend(
            lm.backend, lm.needs, lambda: boundaries(settled.loader), start.attention,
            gather=lambda value: gather(value, world), is_main=world.is_main,
        )  # fmt: skip
        notes += lines
    notes += _track_sources(settled.loader, lm, config)
    settled.loader.sliding_window, settled.loader.rectangles = cost.sliding_window, lm.needs_rectangles
    optimizer = build_optimizer(lm.model, config)
    torch.manual_seed(config.seed * 1_000_003 + world.rank + 1)  # dropout differs between processes
    start.load(settled.checkpoints, lm.model, optimizer)
    metrics = Metrics(config, Path(config.out), settled.num_steps, start.step, world.is_main)
    for note in [*notes, *settled.notes]:
        metrics.say(note)
    return Run(
        config=config,
        card_config=settled.card_config,
        world=world,
        dataset=settled.dataset,
        eval_datasets=settled.eval_datasets,
        lm=lm,
        parallel=parallel,
        optimizer=optimizer,
        loader=settled.loader,
        checkpoints=settled.checkpoints,
        metrics=metrics,
        sampler=settled.sampler,
        cost=cost,
        num_steps=settled.num_steps,
        step=start.step,
        loss=start.loss,
        best=start.best,
        eval_loss=start.eval_loss,
        bad_step=torch.tensor(-1, device=world.device),
    )


def boundaries(loader: PackLoader) -> np.ndarray:
    """Return where the segments of a loader's next micro-batch end, int32 (n + 1,)."""
    ids, read = loader.step_at(loader.steps_taken).batches[0], loader.dataset if loader.drawn is None else loader.drawn
    lengths = [np.diff(read.pack(int(i if i >= 0 else ~i)).cu_seqlens) for i in ids]
    return np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32)


def _track_sources(loader: PackLoader, lm: PackedLM, config: TrainConfig) -> list[str]:
    """Let batches say which source their tokens come from, where the loss by source is wanted and can be had."""
    served = loader.order.passes or loader.sources.names
    if not config.by_source or len(served) < 2:
        return []
    if loader.device.type != "cuda" or not lm.fused or unusable_reason() is not None:
        loader.by_source = True
        return []
    if config.liger == "on":
        return ["loss by source: left out, liger's fused loss cannot give it (liger on)"]
    loader.by_source = True
    return ["liger's fused loss: passed over, it cannot give the loss by source; by_source False takes it"]


def build_model(config: TrainConfig, world: World, datasets: list[Dataset]) -> tuple[PackedLM, ModelCost, list[str]]:
    """Load the model, check it against the datasets (the first is trained on), and prepare it as asked.

    Returns:
        The module whose forward is the loss, what a step of it costs, and what a person should know, one line each.

    Raises:
        PackError: Model, datasets and settings do not fit.
    """
    torch.manual_seed(config.seed)  # the same first weights on every process
    # frozen weights need no fp32 copy to learn in
    narrow = config.dtype == "bf16-pure" or (config.dtype == "bf16" and config.lora_rank > 0)
    loaded = load_model(
        str(config.model),
        dtype=torch.bfloat16 if narrow else torch.float32,
        compute_dtype=torch.float32 if config.dtype == "fp32" else torch.bfloat16,
        attention=config.attention,
        liger=config.liger,
        device=world.device,
        packed=any(dataset.packer != "bucketed" for dataset in datasets),
        host=config.shard == "full",  # no device need hold the whole model
    )
    notes = list(loaded.notes)
    for dataset in datasets:
        notes += check_fit(dataset, loaded.report, config)
    freeze(loaded.model, config.freeze)
    torch.manual_seed(config.seed)
    model = add_adapters(loaded.model, config)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    lm = PackedLM(
        model,
        backend=loaded.backend,
        needs=loaded.needs,
        weighting=config.loss_weighting,
        z_loss=config.z_loss,
        liger=config.liger,
        plain_head=loaded.report.plain_head,
    )
    if config.compile:
        for layer in layers_of(model):
            layer.compile()
    return lm, cost_of(model), list(dict.fromkeys(notes))


def make_loader(config: TrainConfig, world: World, dataset: Dataset, packs_per_step: int | None) -> PackLoader:
    """Return the batches of a run, in its order.

    Raises:
        PackError: Settings, dataset and cache do not fit.
    """
    if dataset.mirror is not None:
        mixed = [name for name, _ in config.mix]
        check_blocks(dataset.shards, dataset.mirror.cache, str(config.order), config.shuffle_block_shards, mixed)
    return PackLoader(
        dataset,
        tokens_per_batch=config.tokens_per_batch,
        packs_per_step=packs_per_step,
        seed=config.seed,
        order=str(config.order),
        shuffle_block_shards=config.shuffle_block_shards,
        last_step=config.last_step,
        largest_first=config.largest_first,
        mix=config.mix,
        mix_by=config.mix_by,
        mix_stop=config.mix_stop,
        repack=config.repack,
        rank=world.rank,
        world_size=world.size,
        num_nodes=world.num_nodes,
        device=world.device,
        static_shapes=config.compile,
        weighting=config.loss_weighting,
    )


def make_sampler(config: TrainConfig, dataset: Dataset, tokens_per_batch: int) -> Sampler | None:
    """Read the prompts of a run, if it has some.

    Raises:
        PackError: They do not fit the dataset.
    """
    if config.sample is None:
        return None
    return Sampler(Path(config.sample), dataset, tokens=config.sample_tokens, tokens_per_batch=tokens_per_batch)


def _order_notes(loader: PackLoader) -> list[str]:
    """Say how long an epoch is, what it leaves out or repeats, and in which shares it mixes sources.

    For 10 packs, 4 in a step, and `last_step` "drop": "an epoch is 2 steps of 4 packs", "2 packs that fill no step are
    left out, others in each epoch (last_step drop)".
    """
    order = loader.order
    noun = "micro-batch" if loader.dataset.packer == "bucketed" else "pack"  # of rows of like length, as many as fit
    steps, units = counted(order.steps_per_epoch, "step"), counted(order.units_per_step, noun)
    notes = [f"an epoch is {steps} of {units}"]
    if loader.drawn is not None:
        share = f"{loader.drawn.share_movable:.0%} of the segments have another of their length in their window"
        notes.append(f"packs are drawn anew in each pass (repack): {share} to change places with")
    if order.dropped:
        verb = "fills no step is" if order.dropped == 1 else "fill no step are"
        notes.append(f"{counted(order.dropped, noun)} that {verb} left out, others in each epoch (last_step drop)")
    if order.repeated:
        twice = f"come{'s' if order.repeated == 1 else ''} twice in an epoch"
        notes.append(f"{counted(order.repeated, noun)} {twice}, to fill its last step (last_step pad)")
    if order.passes:
        rest = [name for name, _, _ in loader.dataset.sources if name not in order.passes]
        notes += [f"source {name}: left out, the mix does not name it" for name in rest]
    return notes + [f"source {name}: each pack {times:.2f} times an epoch" for name, times in order.passes.items()]
