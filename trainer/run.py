"""A run: everything the loop holds, built from its configuration, continued from a checkpoint where asked."""

from __future__ import annotations

import json
import math
import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from shards import Dataset, PackError
from shards.cost import ModelCost
from shards.errors import counted
from trainer.checkpoint import Checkpoints
from trainer.checks import check_datasets, check_fit
from trainer.config import TrainConfig, flag
from trainer.distributed import Parallel, World, layers_of, parallelize
from trainer.loader import PackLoader
from trainer.metrics import Metrics, check_outputs, cost_of, last_step
from trainer.model.adapters import add_adapters, freeze
from trainer.model.loading import checkpoint_activations, load_model
from trainer.model.loss import PackedLM
from trainer.optimizer import build_optimizer

FIXED_ON_RESUME = ("model", "dtype", "lora_rank", "lora_alpha", "lora_targets", "freeze")  # what its tensors mean
# no part of what is trained; a change of packs per step is refused by the loader
UNSAID_ON_RESUME = (
    "dataset", "out", "packs_per_step", "save_every", "keep", "eval_every", "log_every", "resume", "profile",
    "tensorboard", "wandb", "device", "force", "progress",
)  # fmt: skip


@dataclass(kw_only=True)
class Run:
    """Everything that the loop holds."""

    config: TrainConfig
    trained_as: TrainConfig
    "Settings of the last step, for the model's card: those of before where none is left to take."
    world: World
    dataset: Dataset
    held_out: Dataset | None
    model: Any
    lm: PackedLM
    parallel: Parallel
    optimizer: torch.optim.AdamW
    loader: PackLoader
    checkpoints: Checkpoints
    metrics: Metrics
    cost: ModelCost
    num_steps: int
    step: int = 0
    loss: float = math.nan
    best: float = math.inf
    eval_loss: float | None = None
    bad_step: torch.Tensor
    "First step whose gradient is not finite, on the device; -1 for none."

    def due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step == self.num_steps or (every is not None and self.step % every == 0)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward runs."""
        on = self.config.dtype == "bf16" and self.config.shard == "none"  # FSDP2 casts by itself
        return torch.autocast(self.world.device.type, torch.bfloat16) if on else nullcontext()


class Interrupt:
    """Notes Ctrl-C and SIGTERM, so that the loop can save first; a second one stops at once.

    Several processes keep the usual behaviour: they would notice at different steps.
    """

    def __init__(self, world: World) -> None:
        self.asked = False
        alone = world.size == 1 and threading.current_thread() is threading.main_thread()  # others handle no signals
        self._signals = (signal.SIGINT, signal.SIGTERM) if alone else ()

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def set_up(config: TrainConfig, world: World) -> Run:
    """Build everything a run needs, and continue from a checkpoint where asked.

    Raises:
        PackError: Model, dataset, settings and run directory do not fit.
    """
    check_outputs(config)
    out, dataset = Path(config.out), Dataset(config.dataset)
    held_out = Dataset(config.eval) if config.eval else None
    check_datasets(dataset, held_out, config.force)
    checkpoints = Checkpoints(out / "checkpoints", config.keep, world)
    path = checkpoints.latest() if config.resume else None
    facts = _facts(config, checkpoints, path) if path else {}
    if config.resume and not path:
        _refuse_lost(out)
    loader = _loader(config, world, dataset, facts)  # before the model: settings that do not fit are said at once
    if facts:
        loader.load_state_dict(facts["loader"])
    num_steps = config.steps or max(1, round(config.epochs * loader.steps_per_epoch))
    resumed = _resumed(config, num_steps, facts)
    finished = facts.get("step") == num_steps
    trained_as = _settings_before(config, facts) if finished else config
    if finished:  # these would begin files anew
        config = replace(config, tensorboard=False, wandb=None, profile=False)
    elif world.is_main:
        _claim(out, config)
    lm, cost, notes = _model(config, world, [dataset, held_out] if held_out is not None else [dataset])
    loader.sliding_window = cost.sliding_window
    parallel = parallelize(lm, lm.model, world, config.shard, config.dtype)
    optimizer = build_optimizer(lm.model, config)
    torch.manual_seed(config.seed * 1_000_003 + world.rank + 1)  # dropout differs between processes
    if path:
        checkpoints.load(path, lm.model, optimizer)
    metrics = Metrics(config, out, num_steps, facts.get("step", 0), world.is_main)
    if config.warmup_steps >= num_steps:
        notes.append(f"--warmup-steps {config.warmup_steps}: the run ends with step {num_steps}, before it decays")
    for note in [*notes, *_order_notes(loader), *resumed]:
        metrics.say(note)
    return Run(
        config=config,
        trained_as=trained_as,
        world=world,
        dataset=dataset,
        held_out=held_out,
        model=lm.model,
        lm=lm,
        parallel=parallel,
        optimizer=optimizer,
        loader=loader,
        checkpoints=checkpoints,
        metrics=metrics,
        cost=cost,
        num_steps=num_steps,
        step=facts.get("step", 0),
        loss=facts.get("loss", math.nan),
        best=facts.get("best", math.inf),
        eval_loss=facts.get("eval_loss"),
        bad_step=torch.tensor(-1, device=world.device),
    )


def _claim(out: Path, config: TrainConfig) -> None:
    """Make the run directory, unless another run is in it."""
    if not config.resume and any((out / name).exists() for name in ("metrics.jsonl", "checkpoints", "model")):
        raise PackError(f"{out}: holds a run already. Continue it with --resume, or choose another --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "train.json").write_text(json.dumps(config.to_dict(), indent=1))
    except OSError as error:
        raise PackError(f"{out}: cannot write here ({error.strerror}). Choose another --out.") from error


def _refuse_lost(out: Path) -> None:
    """Refuse to start over a run that has lost its checkpoints; one that died before its first has none to lose.

    Raises:
        PackError: There are checkpoints, none of them sound, or there must have been some.
    """
    root = out / "checkpoints"
    if number := len(list(root.glob("step-*"))):
        raise PackError(
            f"{root}: {counted(number, 'checkpoint')}, none sound; expected one to continue from. "
            "Restore one, or choose another --out."
        )
    try:
        every = json.loads((out / "train.json").read_text())["save_every"] or math.inf
    except (OSError, ValueError, KeyError, TypeError):
        every = math.inf
    # the first save makes the directory before the next step is taken
    saved = (out / "model").exists() or (not root.exists() and last_step(out / "metrics.jsonl") > every)
    if saved:
        raise PackError(
            f"{root}: the checkpoints of this run are gone; expected one to continue from. "
            "Restore one, or choose another --out."
        )


def _model(config: TrainConfig, world: World, datasets: list[Dataset]) -> tuple[PackedLM, ModelCost, list[str]]:
    """Load the model, hold it against the datasets (the first is trained on), and prepare it as asked."""
    torch.manual_seed(config.seed)  # the same first weights on every process
    # frozen weights need no fp32 copy to learn in
    narrow = config.dtype == "bf16-pure" or (config.dtype == "bf16" and config.lora_rank > 0)
    loaded = load_model(
        config.model,
        dtype=torch.bfloat16 if narrow else torch.float32,
        compute_dtype=torch.float32 if config.dtype == "fp32" else torch.bfloat16,
        attention=config.attention,
        liger=config.liger,
        device=world.device,
        packed=any(dataset.packer != "bucketed" for dataset in datasets),
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
        weighting=config.loss_weighting,
        z_loss=config.z_loss,
        liger=config.liger,
        plain_head=loaded.report.plain_head,
    )
    if config.compile:
        for layer in layers_of(model):
            layer.compile()
    return lm, cost_of(model), list(dict.fromkeys(notes))


def _resumed(config: TrainConfig, num_steps: int, facts: dict[str, Any]) -> list[str]:
    """Say where a run that was asked to resume goes on.

    Raises:
        PackError: It is behind the last step asked for: the model would be one of more steps than that.
    """
    if not config.resume:
        return []
    if not facts:
        return [f"--resume: there is no checkpoint in {config.out}, so training starts from the first step"]
    taken = facts["step"]
    if taken > num_steps:
        raise PackError(
            f"{config.out}: has taken {counted(taken, 'step')} already, this run asks for {num_steps:,}; nothing is "
            "left to do. Ask for more steps, or start again with another --out."
        )
    if taken == num_steps:
        return [f"--resume: all {counted(taken, 'step')} are taken already; nothing is left to train"]
    return [f"--resume: goes on after step {taken:,} of {num_steps:,}", *_changes(config, facts)]


def _changes(config: TrainConfig, facts: dict[str, Any]) -> list[str]:
    """Say which settings of the run were others before, one line each."""
    lines = []
    for name, now in json.loads(json.dumps(config.to_dict())).items():
        before = facts["config"].get(name)
        if name not in UNSAID_ON_RESUME and before != now:
            was, is_now = ("not set" if value is None else value for value in (before, now))
            lines.append(f"--resume: {flag(name)} {was} before, {is_now} now")
    return lines


def _settings_before(config: TrainConfig, facts: dict[str, Any]) -> TrainConfig:
    """Return the settings that a checkpoint was saved with, for a run directory that may have moved."""
    known = {field.name for field in fields(TrainConfig)} - {"out"}
    return replace(config, **{name: value for name, value in facts["config"].items() if name in known})


def _loader(config: TrainConfig, world: World, dataset: Dataset, facts: dict[str, Any]) -> PackLoader:
    # the default depends on the number of processes; a run that is resumed on others keeps its steps
    kept = facts["loader"]["packs_per_step"] if facts else None
    return PackLoader(
        dataset,
        tokens_per_batch=config.tokens_per_batch,
        packs_per_step=config.packs_per_step or kept,
        seed=config.seed,
        order=config.order,
        last_step=config.last_step,
        largest_first=config.largest_first,
        mix=config.mix,
        mix_by=config.mix_by,
        mix_stop=config.mix_stop,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        static_shapes=config.compile,
        weighting=config.loss_weighting,
    )


def _order_notes(loader: PackLoader) -> list[str]:
    plan = loader.plan
    noun = "micro-batch" if loader.dataset.packer == "bucketed" else "pack"  # of rows of like length, as many as fit
    steps, units = counted(plan.steps_per_epoch, "step"), counted(plan.units_per_step, noun)
    notes = [f"an epoch is {steps} of {units}"]
    if plan.dropped:
        verb = "fills no step is" if plan.dropped == 1 else "fill no step are"
        notes.append(f"{counted(plan.dropped, noun)} that {verb} left out, others in each epoch (--last-step drop)")
    if plan.repeated:
        twice = f"come{'s' if plan.repeated == 1 else ''} twice in an epoch"
        notes.append(f"{counted(plan.repeated, noun)} {twice}, to fill its last step (--last-step pad)")
    if plan.passes:
        rest = [name for name, _, _ in loader.dataset.sources if name not in plan.passes]
        notes += [f"source {name}: left out, --mix does not name it" for name in rest]
    return notes + [f"source {name}: each pack {times:.2f} times an epoch" for name, times in plan.passes.items()]


def _facts(config: TrainConfig, checkpoints: Checkpoints, path: Path) -> dict[str, Any]:
    facts = checkpoints.facts(path)
    for name in FIXED_ON_RESUME:
        before, now = facts["config"][name], config.to_dict()[name]
        if json.dumps(before) != json.dumps(now):
            raise PackError(
                f"{path}: was saved with {flag(name)} {before!r}, this run has {now!r}. Resume with the same."
            )
    return facts
