"""What a training run is asked to do: one frozen record, built by the command line or by hand, saved with the run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shards.errors import PackError
from shards.fetching.cache import DEFAULT_LIMIT, Cache, parse_size
from shards.fetching.remote import hide_secrets, is_url
from shards.settings import check_choices, set_path

if TYPE_CHECKING:
    from shards import Dataset


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One `pack train`; what is said of a field is the help of its flag."""

    dataset: Annotated[str | Path, "Dataset directory, or URL such as s3://bucket/dataset."]
    model: Annotated[str | Path, "Model name, directory, or config JSON (random weights)."]
    out: Annotated[str | Path, "Run directory."]
    epochs: Annotated[float, "Passes over the dataset."] = 1.0
    steps: Annotated[int | None, "Optimizer steps, instead of --epochs."] = None
    tokens_per_batch: Annotated[int | None, "Tokens in a micro-batch on one device. [default: one pack]"] = None
    packs_per_step: Annotated[int | None, "Packs in a step over all devices. [default: one micro-batch on each]"] = None
    optimizer: Annotated[
        Literal["adamw", "adamw-8bit", "muon", "adafactor"],
        "adamw-8bit keeps moments in 8 bits, muon moves matrices of linear layers, adafactor keeps rows and columns.",
    ] = "adamw"
    lr: Annotated[float, "Highest learning rate."] = 2e-5
    min_lr: Annotated[float, "Learning rate at the end."] = 0.0
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "wsd"],
        "Shape of the learning rate after warm-up; wsd is constant, then linear.",
    ] = "cosine"
    warmup_steps: Annotated[int, "Steps of linear warm-up."] = 0
    decay_steps: Annotated[int | None, "Steps of the final decay of wsd. [default: a fifth of the run]"] = None
    weight_decay: Annotated[float, "Weight decay of matrices; norms and biases have none."] = 0.1
    beta1: Annotated[float, "First beta of AdamW, also in 8 bit and beside muon."] = 0.9
    beta2: Annotated[float, "Second beta of AdamW, also in 8 bit and beside muon."] = 0.95
    clip: Annotated[float, "Largest gradient norm; 0 for no clipping."] = 1.0
    dtype: Annotated[
        Literal["bf16", "bf16-pure", "fp32"], "bf16: fp32 weights, bf16 arithmetic; bf16-pure: bf16 weights too."
    ] = "bf16"
    attention: Annotated[
        str, "Attention backend: auto (the fastest), flash-attn-4, flash-attn-3, flash-attn, torch, flex or cpu."
    ] = "auto"
    compile: Annotated[bool, "Compile each layer; batches then have one shape."] = False
    liger: Annotated[
        Literal["auto", "on", "off"], "Fused kernels of liger-kernel; auto uses them where installed, on a GPU."
    ] = "auto"
    loss_weighting: Annotated[Literal["token", "document"], "What weighs the same: each target, or each document."] = (
        "token"
    )
    z_loss: Annotated[float, "Weight of the squared log-partition term."] = 0.0
    order: Annotated[
        Literal["shuffled", "cost-grouped", "block-shuffled", "block-cost-grouped"] | None,
        "Order of packs; cost-grouped evens out many ranks, block-… shuffles inside blocks of shards. [default: "
        "shuffled; block-shuffled for a URL]",
    ] = None
    shuffle_block_shards: Annotated[int, "Shards in a block of the block-… orders."] = 64
    cache_dir: Annotated[
        str | Path | None, "Where shards of a URL are kept. [default: ~/.cache/shardpack/datasets]"
    ] = None
    cache_limit: Annotated[str, "Most bytes of shards kept there."] = DEFAULT_LIMIT
    last_step: Annotated[
        Literal["drop", "pad"], "Packs that do not fill an epoch's last step: leave out, or fill up."
    ] = "drop"
    largest_first: Annotated[bool, "Begin with the costliest step: too large a batch fails at once."] = False
    mix: Annotated[tuple[tuple[str, float], ...], "Weights of named sources, such as web=0.7,code=0.3."] = ()
    mix_by: Annotated[Literal["tokens", "targets", "packs"], "What the weights of --mix count."] = "tokens"
    mix_stop: Annotated[Literal["first", "longest"], "Source whose end is a mixed epoch's end."] = "first"
    repack: Annotated[bool, "Draw other packs for every epoch, from the segments of each window."] = False
    freeze: Annotated[tuple[str, ...], "Parameters left as they are, such as 'model.embed*'; repeatable."] = ()
    lora_rank: Annotated[int, "Rank of LoRA adapters; 0 trains the model itself."] = 0
    lora_alpha: Annotated[int | None, "LoRA scale. [default: twice the rank]"] = None
    lora_targets: Annotated[tuple[str, ...], "Modules with adapters, with commas. [default: all linear but head]"] = ()
    activation_checkpointing: Annotated[bool, "Recompute layers in backward to save memory."] = False
    shard: Annotated[Literal["none", "full"], "Weights on each device: all (none) or a slice (full)."] = "none"
    save_every: Annotated[int | None, "Steps between checkpoints. [default: only at the end]"] = None
    keep: Annotated[int, "Checkpoints kept beside the best one."] = 2
    checkpoint_url: Annotated[
        str | None, "URL that gets each checkpoint too, such as s3://bucket/run; --resume looks there as well."
    ] = None
    eval: Annotated[str | Path | None, "Evaluation dataset directory, or several by name: web=DIR,code=DIR."] = None
    eval_every: Annotated[int | None, "Steps between evaluations. [default: only at the end]"] = None
    sample: Annotated[str | Path | None, "Prompts to write from: one a line, or JSONL of prompt or messages."] = None
    sample_every: Annotated[int | None, "Steps between samples. [default: only at the end]"] = None
    sample_tokens: Annotated[int, "Tokens written after each prompt, at most."] = 64
    log_every: Annotated[int, "Steps between lines of metrics."] = 10
    by_source: Annotated[bool, "Report the loss of each source too, where there are several."] = True
    seed: Annotated[int, "Seed of order, first weights and dropout."] = 0
    resume: Annotated[bool, "Continue from the newest intact checkpoint."] = False
    profile: Annotated[bool, "Write a torch profiler trace of three steps."] = False
    tensorboard: Annotated[bool, "Also write TensorBoard events."] = False
    wandb: Annotated[str | None, "Weights & Biases project to log to."] = None
    device: Annotated[str | None, "cuda or cpu. [default: cuda where there is one]"] = None
    force: Annotated[bool, "Go on with an unpacked dataset or a foreign tokenizer."] = False
    progress: Annotated[bool, "Progress on stderr: a live line, or lines where it is no terminal."] = True

    def __post_init__(self) -> None:
        set_path(self, "dataset", "model", "out", "eval", "sample", "cache_dir")
        if self.order is None:  # settled here, so that a copy of the dataset on this machine comes in the same order
            object.__setattr__(self, "order", "block-shuffled" if is_url(str(self.dataset)) else "shuffled")
        check_choices(self)
        parse_size(self.cache_limit)
        for name in (
            "steps", "tokens_per_batch", "packs_per_step", "decay_steps",
            "save_every", "eval_every", "sample_every", "sample_tokens", "log_every", "keep",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackError(f"`{name}`: {value}; expected at least 1.")
        for name in ("lr", "min_lr", "weight_decay", "clip", "z_loss", "warmup_steps", "lora_rank", "seed"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise PackError(f"`{name}`: {value}; expected a finite number, 0 or more.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise PackError(f"`{name}`: {getattr(self, name)}; expected 0 or more, and less than 1.")
        if not math.isfinite(self.epochs) or self.epochs <= 0:
            raise PackError(f"`epochs`: {self.epochs}; expected more than 0.")
        if self.checkpoint_url is not None and not is_url(self.checkpoint_url):
            raise PackError(f"`checkpoint_url`: {self.checkpoint_url!r}; expected a URL such as s3://bucket/run.")
        self.eval_paths()
        if self.eval_every and not self.eval:
            raise PackError("`eval_every`: there is no evaluation dataset; expected one. Add `eval`.")
        if self.sample_every and not self.sample:
            raise PackError("`sample_every`: there are no prompts; expected a file of them. Add `sample`.")
        if not all(0 < weight < math.inf for _, weight in self.mix) or len(dict(self.mix)) < len(self.mix):
            weights = ",".join(f"{name}={weight:g}" for name, weight in self.mix)
            raise PackError(
                f"`mix`: {weights}; expected each source once, with a finite weight above 0. "
                "To leave a source out, do not name it."
            )
        for name, usual in (("mix_by", "tokens"), ("mix_stop", "first")):
            if getattr(self, name) != usual and not self.mix:
                raise PackError(f"`{name}`: there is no mix; expected one. Add `mix`.")
        if self.min_lr > self.lr:
            raise PackError(f"`min_lr`: {self.min_lr}; expected at most `lr`, {self.lr}.")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise PackError(
                f'`decay_steps`: `schedule="{self.schedule}"` has no final decay; expected one that has. '
                'Use `schedule="wsd"`.'
            )
        # scales of blocks, means of rows and columns: those of slices are others
        if self.optimizer in ("adamw-8bit", "adafactor") and self.shard == "full":
            raise PackError(
                f'`optimizer="{self.optimizer}"`: it needs whole tensors, and `shard="full"` gives a process slices; '
                'expected adamw or muon. Choose one of these, or use `shard="none"`.'
            )
        for name in ("lora_alpha", "lora_targets"):
            if getattr(self, name) and not self.lora_rank:
                raise PackError(f"`{name}`: there are no adapters; expected some. Add `lora_rank`.")

    def eval_paths(self) -> dict[str, str]:
        """Return the evaluation datasets by name; a single one that has no name is "".

        Raises:
            PackError: One of several has no name, or two have the same.
        """
        if self.eval is None:
            return {}
        text = str(self.eval)
        if "=" not in text or Path(text).exists():
            return {"": text}
        pairs = [part.partition("=") for part in text.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        if not all(names) or not all(path for _, _, path in pairs) or len(set(names)) < len(names):
            raise PackError(f"`eval`: {text!r}; expected a directory, or NAME=DIR,NAME=DIR with names that differ.")
        return {name: path.strip() for name, (_, _, path) in zip(names, pairs, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values; URLs without what they carry to sign in."""
        values = asdict(self)
        places = ("dataset", "model", "eval", "checkpoint_url")
        return values | {name: hide_secrets(values[name]) for name in places if isinstance(values.get(name), str)}

    def open_dataset(self, path: str | Path) -> Dataset:
        """Open a dataset; the shards of a URL go into the cache of this run.

        Raises:
            PackError: There is none, or the cache cannot be used.
        """
        from shards import Dataset

        return Dataset(path, cache=Cache(self.cache_dir, self.cache_limit) if is_url(str(path)) else None)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """One `pack export-model`; what is said of a field is the help of its flag.

    Raises:
        PackError: It names two checkpoints.
    """

    run: Annotated[str | Path, "Run directory."]
    step: Annotated[int | None, "Step of the checkpoint. [default: the newest]"] = None
    best: Annotated[bool, "Take the checkpoint with the lowest evaluation loss."] = False
    out: Annotated[str | Path | None, "Directory that gets model/ and adapter/. [default: RUN/export/step-N]"] = None
    dataset: Annotated[str | Path | None, "Dataset, where it has moved. [default: the run's]"] = None
    model: Annotated[str | Path | None, "Base model, where it has moved. [default: the run's]"] = None

    def __post_init__(self) -> None:
        set_path(self, "run", "out", "dataset", "model")
        if self.best and self.step is not None:
            raise PackError(f"`step`: {self.step}, and `best` names another checkpoint; expected one. Leave one out.")
