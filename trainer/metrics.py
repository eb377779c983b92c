"""What a run reports: metrics.jsonl always, progress on stderr unless told not to, TensorBoard and W&B when asked.

On a terminal progress is one live line; in a file or a pipe, as on a cluster, one line for each line of metrics.

Model FLOPs count the matrix products of forward and backward (6 a parameter and token) and the attention pairs that
packed rows really have, 12 x heads x head_dim a pair and layer: the usual full-square term overstates attention
126-fold for rows of 64 documents.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import nn

from shards.cost import ModelCost
from shards.errors import PackError
from shards.text import printable
from trainer.config import TrainConfig
from trainer.model.loss import unwrap
from trainer.saving.metric_lines import step_of

# dense bf16 FLOP/s by a part of the device's name, from the vendors' data sheets
PEAK_FLOPS = {
    "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "H20": 148e12, "A100": 312e12,
    "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "A40": 150e12,
    "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12,
}  # fmt: skip


SHOWN = 200  # characters of a sample in a log
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def cost_of(model: nn.Module) -> ModelCost:
    """Read the cost of a transformers model from its parameters and configuration."""
    base = unwrap(model)
    config = base.config.get_text_config()
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings()
    lookups = {id(embedding)} if head is None or head.weight is not embedding else set()
    experts = next((n for name in EXPERT_COUNTS if (n := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    share = active / experts if experts and active else 1.0
    per_token = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in lookups:
            passes = 6 if parameter.requires_grad else 4  # a frozen weight has no gradient of its own
            per_token += passes * parameter.numel() * (share if ".experts." in name else 1.0)
    pairs = {"full": 0.0, "window": 0.0}
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    for kind, widths in attention_layers(config):
        narrow = kind in ("sliding_attention", "chunked_attention") and window is not None
        pairs["window" if narrow else "full"] += 6.0 * widths
    return ModelCost(
        per_token=per_token,
        per_pair=pairs["full"],
        per_window_pair=pairs["window"],
        sliding_window=window if pairs["window"] else None,
    )


def attention_layers(config: Any) -> Iterator[tuple[str, int]]:
    """Yield each attention layer's kind and the widths of its query and value heads, summed over heads.

    Layers may differ in heads and widths (Gemma 4), keys may be wider than values (latent attention), and layers
    without scores (recurrent, convolutional, linear attention) are left out. A chunk counts as a window of its size.
    """
    count = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    layers = getattr(config, "per_layer_config", None)
    for i, kind in enumerate(kinds):
        layer = layers[i] if layers else config
        heads = getattr(layer, "num_attention_heads", 0)  # none in a state-space model
        if ("attention" not in kind and "hybrid" not in kind) or kind == "linear_attention" or not heads:
            continue
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        latent = getattr(layer, "qk_nope_head_dim", None)
        keys = latent + layer.qk_rope_head_dim if latent else width
        yield kind, heads * (keys + (getattr(layer, "v_head_dim", None) or width))


def peak_flops(device: torch.device) -> float | None:
    """Return the bf16 FLOP/s on the data sheet of a device, None where this program knows none."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def memory_gib(device: torch.device) -> float:
    """Return the highest memory use so far, in GiB: of the device, or of this process on a CPU; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource  # POSIX alone has it
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def check_outputs(config: TrainConfig) -> None:
    """Find out whether all that was asked for can be written, before anything is.

    Raises:
        PackError: A package is not installed.
    """
    if config.wandb and find_spec("wandb") is None:
        raise PackError("`wandb`: wandb is not installed; expected the package. Run pip install wandb.")


class Sample(TypedDict):
    """A prompt and what the model wrote after it."""

    prompt: str
    text: str


class Metrics:
    """Writes the figures of a run; a process that is not the main one writes nothing.

    Args:
        out: Run directory.
        num_steps: Steps of the run.
        start: Steps already taken; later lines of an earlier attempt are removed.
    """

    def __init__(self, config: TrainConfig, out: Path, num_steps: int, start: int, is_main: bool) -> None:
        self._file = self._board = self._wandb = None
        self._live: Live | None = None
        self._num_steps, self._show_progress = num_steps, config.progress
        if not is_main:
            return
        path = out / "metrics.jsonl"
        kept = []
        if start and path.exists():
            kept = [line for line in path.read_text().splitlines() if step_of(line) <= start]
        path.write_text("".join(line + "\n" for line in kept))
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=start + 1)
        if config.wandb:
            import wandb

            self._wandb = wandb.init(project=config.wandb, dir=str(out), config=config.to_dict(), resume="allow")
        self._file = path.open("a")
        console = Console(stderr=True)
        if config.progress and console.is_terminal:
            self._live = Live(_one_line(f"step {start:,}/{num_steps:,}"), console=console, auto_refresh=False)
            self._live.start(refresh=True)

    def write(self, line: dict[str, Any]) -> None:
        """Write one line of figures; it has a `step`."""
        if self._file is None:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        figures = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        if self._board is not None:
            for key, value in figures.items():
                self._board.add_scalar(key, value, line["step"])
        if self._wandb is not None:
            self._wandb.log(figures, step=line["step"])
        if self._show_progress:
            self._report(line)

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        """Write what the model wrote after its prompts."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, "samples": samples}) + "\n")
        self._file.flush()
        if self._board is not None:
            for number, sample in enumerate(samples, 1):
                self._board.add_text(f"sample/{number}", f"{_code(sample['prompt'])}\n\n{_code(sample['text'])}", step)
        if self._wandb is not None:
            import wandb

            rows = [[sample["prompt"], sample["text"]] for sample in samples]
            self._wandb.log({"samples": wandb.Table(columns=["prompt", "text"], data=rows)}, step=step)
        if self._show_progress:
            for sample in samples:
                text = " ".join(f"{sample['prompt']} → {sample['text']}".split())
                self.say(f"step {step:,}/{self._num_steps:,}  sample: {shorten(text)}")

    def _report(self, line: dict[str, Any]) -> None:
        at = f"step {line['step']:,}/{self._num_steps:,}"
        if "eval_loss" in line:
            by_name = [(key.partition("/")[2], value) for key, value in line.items() if key.startswith("eval_loss/")]
            each = "".join(f", {name} {loss:.4f}" for name, loss in by_name)
            self.say(f"{at}  eval loss {line['eval_loss']:.4f}{each}")
            return
        left = timedelta(seconds=round(line["step_s"] * (self._num_steps - line["step"])))
        text = f"{at}  {left} left  {_describe(line)}"
        if self._live is not None:
            with _droppable():
                self._live.update(_one_line(text), refresh=True)
        else:
            self.say(text)

    def say(self, message: str) -> None:
        """Print one line on stderr, above the live line."""
        if self._live is not None:
            with _droppable():
                self._live.console.print(printable(message), markup=False, highlight=False)
        elif self._file is not None:
            say(message)

    def close(self) -> None:
        """Close every output."""
        if self._live is not None:
            with _droppable():
                self._live.stop()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._file is not None:
            self._file.close()


def _code(text: str) -> str:
    """Return text as an indented block of Markdown, which TensorBoard then shows as it is."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def shorten(text: str) -> str:
    """Return text of at most 200 characters; what is left out is marked."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def say(message: str) -> None:
    """Print one line on stderr; where nobody reads it any more, it is dropped."""
    with _droppable():
        print(printable(message), file=sys.stderr, flush=True)


@contextmanager
def _droppable() -> Iterator[None]:
    """Let progress that cannot be written be lost: a run does not end because its terminal or its log has."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)  # what libraries write later goes there too
        os.close(nowhere)


def _one_line(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")  # cut where the terminal is narrow


def _describe(line: dict[str, Any]) -> str:
    parts = [
        f"loss {line['loss']:.4f}",
        f"lr {line['lr']:.2e}",
        f"grad {line['grad_norm']:.3f}",
        f"{line['tokens_per_s']:,.0f} tok/s",
        f"wait {line['data_wait']:.1%}",
        f"{line['memory_gib']:.1f} GiB",
    ]
    if line.get("mfu") is not None:
        parts.insert(4, f"MFU {line['mfu']:.1%}")
    if "fetched_mb_per_s" in line:
        parts.append(f"fetched {line['fetched_mb_per_s']:,.1f} MB/s")
    return "  ".join(parts)
