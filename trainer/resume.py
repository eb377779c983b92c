"""Where a run starts: its newest checkpoint, read into one value before anything of the run is built.

A run that is not resumed starts at the default `ResumePoint`, so nothing after it asks whether there was a checkpoint.
"""

import json
import math
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from shards.errors import PackError, counted
from shards.lock import Lock
from shards.publish import LocalStore
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.loader import PackLoader
from trainer.metrics import say
from trainer.optimizer import describe_schedule, learning_rate
from trainer.saving.checkpoint import Checkpoints
from trainer.saving.metric_lines import last_step

# what its tensors mean
FIXED_ON_RESUME = ("model", "dtype", "optimizer", "lora_rank", "lora_alpha", "lora_targets", "freeze")
# no part of what is trained; a change of packs per step is refused by the loader
UNSAID_ON_RESUME = (
    "dataset", "out", "packs_per_step", "save_every", "keep", "eval_every", "sample", "sample_every", "sample_tokens",
    "log_every", "by_source", "resume", "profile", "tensorboard", "wandb", "device", "force", "progress",
    "cache_dir", "cache_limit", "checkpoint_url",
)  # fmt: skip

# of runs that were saved before a setting was there
_DEFAULTS = {each.name: each.default for each in fields(TrainConfig) if each.default is not MISSING}


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run starts, and what was known there."""

    checkpoint: Path | None = None
    "What to load; None for the weights that the model brings."
    step: int = 0
    "Steps taken."
    num_steps: int = 0
    "Steps that the run was to take."
    loss: float = math.nan
    best: float = math.inf
    "Lowest evaluation loss so far."
    eval_loss: float | None = None
    attention: Any = None
    "Its attention backend, as `backends.agreement.to_json` writes it."
    loader_state: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    "Fields of the `TrainConfig` that it was saved with."

    @property
    def packs_per_step(self) -> int | None:
        """Packs in a step so far: the default depends on the number of processes, and these may be others now."""
        return None if self.loader_state is None else int(self.loader_state["packs_per_step"])

    def is_end(self, num_steps: int) -> bool:
        """Whether no step is left to take."""
        return self.step == num_steps

    def place(self, loader: PackLoader) -> None:
        """Let a loader go on from here.

        Raises:
            PackError: It reads another dataset, or in another order.
        """
        if self.loader_state is not None:
            loader.load_state_dict(self.loader_state)

    def load(self, checkpoints: Checkpoints, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the state of this point into a model, its optimizer and the random generators."""
        if self.checkpoint is not None:
            checkpoints.load(self.checkpoint, model, optimizer)

    def configs(self, config: TrainConfig, num_steps: int) -> tuple[TrainConfig, TrainConfig]:
        """Return the settings to run with, and those that the model's card reports.

        Where no step is left, the card keeps the settings of the last step, and outputs that would begin anew are off.
        """
        if not self.is_end(num_steps):
            return config, config
        return replace(config, tensorboard=False, wandb=None, profile=False), self._config_before(config)

    def _config_before(self, config: TrainConfig) -> TrainConfig:
        known = {each.name for each in fields(TrainConfig)} - {"out"}  # the run directory may have moved
        return replace(config, **{name: value for name, value in self.settings.items() if name in known})

    def notes(self, config: TrainConfig, num_steps: int) -> list[str]:
        """Say where the run goes on, and which of its settings changed.

        Raises:
            PackError: More steps are taken than are asked for: the model would be one of more steps than that.
        """
        if not config.resume:
            return []
        if self.checkpoint is None:
            return [f"resume: there is no checkpoint in {config.out}, so training starts from the first step"]
        if self.step > num_steps:
            raise PackError(
                f"{config.out}: has taken {counted(self.step, 'step')} already; expected at most {num_steps:,}, which "
                "this run asks for. Ask for more steps, or start again with another `out`."
            )
        if self.is_end(num_steps):
            return [f"resume: all {counted(self.step, 'step')} are taken already; nothing is left to train"]
        return [f"resume: goes on after step {self.step:,} of {num_steps:,}", *self._changes(config, num_steps)]

    def _changes(self, config: TrainConfig, num_steps: int) -> list[str]:
        lines = []
        for name, now in json.loads(json.dumps(config.to_dict())).items():
            before = self.settings.get(name, _DEFAULTS.get(name))
            if name not in UNSAID_ON_RESUME and before != now:
                was, is_now = ("not set" if value is None else value for value in (before, now))
                lines.append(f"resume: {name} {was} before, {is_now} now")
        settings_before = self._config_before(config)
        before, now = (
            learning_rate(self.step, steps, settings)
            for steps, settings in ((self.num_steps, settings_before), (num_steps, config))
        )
        if not math.isclose(before, now, rel_tol=1e-6):
            lines.append(
                f"resume: the next step takes a learning rate of {now:.2e}; it would have been {before:.2e} with the "
                f"settings of before and their {self.num_steps:,} steps"
            )
        was, goes_on = (
            describe_schedule(self.step, steps, settings)
            for steps, settings in ((self.num_steps, settings_before), (num_steps, config))
        )
        if was != goes_on:
            lines.append(f"resume: the learning rate goes on {goes_on}; before: {was}")
        return lines


def find_resume_point(config: TrainConfig, checkpoints: Checkpoints) -> ResumePoint:
    """Return the newest intact checkpoint of a run that is to be resumed; otherwise the first step.

    Raises:
        PackError: The checkpoint is of another model, or the run had checkpoints and has no intact one.
    """
    if not config.resume:
        return ResumePoint()
    path = checkpoints.latest()
    if path is None:
        _refuse_lost(Path(config.out))
        return ResumePoint()
    facts = checkpoints.facts(path)
    try:
        point = ResumePoint(
            checkpoint=path,
            step=int(facts["step"]),
            num_steps=int(facts["num_steps"]),
            loss=float(facts["loss"]),
            best=float(facts["best"]),
            eval_loss=None if facts["eval_loss"] is None else float(facts["eval_loss"]),
            attention=facts.get("attention"),
            loader_state={**facts["loader"], "packs_per_step": int(facts["loader"]["packs_per_step"])},
            settings={**facts["config"]},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PackError(f"{path}: its facts are not those of a run ({error}). Delete it, or restore it.") from error
    for name in FIXED_ON_RESUME:
        before, now = point.settings.get(name, _DEFAULTS.get(name)), config.to_dict()[name]
        if json.dumps(before) != json.dumps(now):
            raise PackError(f"{path}: was saved with `{name}` {before!r}, this run has {now!r}. Resume with the same.")
    return point


def _refuse_lost(out: Path) -> None:
    """Refuse to start over a run that has lost its checkpoints; one that died before its first has none to lose.

    Raises:
        PackError: There are checkpoints, none of them intact, or there must have been some.
    """
    root = out / "checkpoints"
    if number := len(list(root.glob("step-*"))):
        raise PackError(
            f"{root}: {counted(number, 'checkpoint')}, none intact; expected one to continue from. "
            "Restore one, or choose another `out`."
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
            "Restore one, or choose another `out`."
        )


@contextmanager
def locked(out: Path, world: World) -> Iterator[Lock | None]:
    """Hold a run directory, so that two trainings never write into one; the main process does it for all.

    Raises:
        LockedError: Another one writes there.
        PackError: The directory cannot be made.
    """
    if not world.is_main:
        yield None
        return
    made = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackError(f"{out}: cannot write here ({error.strerror}). Choose another `out`.") from error
    try:
        with Lock(LocalStore(out), uuid.uuid4().hex, "training run", alone=True, on_message=say) as lock:
            yield lock
    finally:
        if made:
            with suppress(OSError):  # it holds something by now
                out.rmdir()


def claim_directory(config: TrainConfig) -> None:
    """Make the run directory and write the settings into it, unless another run is in it.

    Raises:
        PackError: It holds a run and this one does not resume it, or it cannot be written.
    """
    out = Path(config.out)
    if not config.resume and any((out / name).exists() for name in ("metrics.jsonl", "checkpoints", "model")):
        raise PackError(f"{out}: holds a run already. Continue it with `resume`, or choose another `out`.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "train.json").write_text(json.dumps(config.to_dict(), indent=1))
    except OSError as error:
        raise PackError(f"{out}: cannot write here ({error.strerror}). Choose another `out`.") from error
