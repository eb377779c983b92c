"""What a training run is asked to do: one frozen record, built by the command line or by hand, saved with the run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from shards.errors import PackError

CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("cosine", "linear", "constant", "wsd"),
    "dtype": ("bf16", "bf16-pure", "fp32"),
    "liger": ("auto", "on", "off"),
    "loss_weighting": ("token", "document"),
    "order": ("shuffled", "cost-grouped"),
    "last_step": ("drop", "pad"),
    "shard": ("none", "full"),
    "mix_by": ("tokens", "targets", "packs"),
    "mix_stop": ("first", "longest"),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One `pack train`."""

    dataset: str
    "Dataset directory."
    model: str
    "Model name, local directory, or a config JSON (random weights)."
    out: str
    "Run directory: metrics, checkpoints, exported model."
    epochs: float = 1.0
    "Passes over the dataset; ignored where steps is given."
    steps: int | None = None
    "Optimizer steps; None for epochs."
    tokens_per_batch: int | None = None
    "Tokens in one micro-batch on one device; None for one pack."
    packs_per_step: int | None = None
    "Packs in one optimizer step over all devices; None for one micro-batch on each."
    lr: float = 2e-5
    "Highest learning rate."
    min_lr: float = 0.0
    "Learning rate at the end of the schedule."
    schedule: str = "cosine"
    "Shape of the learning rate after warm-up: cosine, linear, constant, or wsd (constant, then linear to min_lr)."
    warmup_steps: int = 0
    "Steps of linear warm-up."
    decay_steps: int | None = None
    "Steps of the final decay of wsd; None for a fifth of the run."
    weight_decay: float = 0.1
    "Weight decay of matrices; norms and biases have none."
    beta1: float = 0.9
    "AdamW's first beta."
    beta2: float = 0.95
    "AdamW's second beta."
    clip: float = 1.0
    "Largest gradient norm; 0 for no clipping."
    dtype: str = "bf16"
    "bf16 (autocast, fp32 weights), bf16-pure (bf16 weights too), or fp32."
    attention: str = "auto"
    "Attention backend, or auto."
    compile: bool = False
    "Compile each layer; every batch then has the same shape."
    liger: str = "auto"
    "liger-kernel's fused kernels: auto (where installed, on a GPU), on, off."
    loss_weighting: str = "token"
    "Each target weighs the same (token), or each segment does (document)."
    z_loss: float = 0.0
    "Weight of the squared log-partition term."
    order: str = "shuffled"
    "shuffled, or cost-grouped: packs of like attention cost share a step."
    last_step: str = "drop"
    "Packs that do not fill the last step of an epoch: drop them, or pad the step with packs from the epoch's start."
    largest_first: bool = False
    "Begin each epoch with the step that needs most memory, so that too large a batch fails at once."
    mix: tuple[tuple[str, float], ...] = ()
    "Weights of named sources; empty for all packs once an epoch."
    mix_by: str = "tokens"
    "What the weights of mix count: tokens, packs or targets."
    mix_stop: str = "first"
    "A mixed epoch ends when the first source is used up, or with the longest (the others start again)."
    freeze: tuple[str, ...] = ()
    "Parameters that stay as they are: patterns such as 'model.embed_tokens.*'."
    lora_rank: int = 0
    "Rank of LoRA adapters; 0 trains the model itself."
    lora_alpha: int | None = None
    "LoRA scale; None for twice the rank."
    lora_targets: tuple[str, ...] = ()
    "Module names that get adapters; empty for all linear layers but the head."
    activation_checkpointing: bool = False
    "Recompute each layer in the backward pass to save memory."
    shard: str = "none"
    "none (DDP, a full copy on each device) or full (FSDP2)."
    save_every: int | None = None
    "Steps between checkpoints; None for only at the end."
    keep: int = 2
    "Checkpoints kept beside the best one."
    eval: str | None = None
    "Held-out dataset directory."
    eval_every: int | None = None
    "Steps between evaluations; None for only at the end."
    log_every: int = 10
    "Steps between lines of metrics.jsonl."
    seed: int = 0
    "Seed of order, initial weights and dropout."
    resume: bool = False
    "Continue from the newest sound checkpoint of the run directory."
    profile: bool = False
    "Write a torch profiler trace of a few steps."
    tensorboard: bool = False
    "Also write TensorBoard events."
    wandb: str | None = None
    "Weights & Biases project to log to."
    device: str | None = None
    "cuda or cpu; None for cuda where there is one."
    force: bool = False
    "Go on where a start-up check would refuse an unpacked dataset, a foreign tokenizer or a used run directory."
    progress: bool = True
    "Progress on stderr: a live line on a terminal, elsewhere a line for each line of metrics."

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise PackError(f"{flag(name)}: {getattr(self, name)!r}; expected one of {', '.join(allowed)}.")
        for name in ("steps", "tokens_per_batch", "packs_per_step", "save_every", "eval_every", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackError(f"{flag(name)}: {value}; expected at least 1.")
        for name in ("lr", "min_lr", "weight_decay", "clip", "z_loss", "warmup_steps", "lora_rank", "keep"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise PackError(f"{flag(name)}: {value}; expected a finite number, 0 or more.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise PackError(f"{flag(name)}: {getattr(self, name)}; expected 0 or more, and less than 1.")
        if not math.isfinite(self.epochs) or self.epochs <= 0:
            raise PackError(f"--epochs: {self.epochs}; expected more than 0.")
        if self.eval_every and not self.eval:
            raise PackError("--eval-every: no held-out dataset is given. Add --eval DATASET.")
        if not all(0 < weight < math.inf for _, weight in self.mix) or len(dict(self.mix)) < len(self.mix):
            weights = ",".join(f"{name}={weight:g}" for name, weight in self.mix)
            raise PackError(
                f"--mix: {weights}; expected each source once, with a finite weight above 0. "
                "To leave a source out, do not name it."
            )
        if self.min_lr > self.lr:
            raise PackError(f"--min-lr: {self.min_lr}; expected at most --lr, {self.lr}.")
        if self.decay_steps is not None and (self.schedule != "wsd" or self.decay_steps < 1):
            raise PackError(f"--decay-steps: {self.decay_steps}; expected at least 1, and --schedule wsd.")
        for name in ("lora_alpha", "lora_targets"):
            if getattr(self, name) and not self.lora_rank:
                raise PackError(f"{flag(name)}: there are no adapters. Add --lora-rank.")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return asdict(self)


def flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + name.replace("_", "-")
