"""One strategy against the clock: warm up every shape, put the weights back, take the same steps, note time and loss.

Every strategy starts from the same weights and the same fresh AdamW, so the losses of step after step must agree: that
is the proof that all of them train the same thing. Times are of device events on a GPU. Running out of memory, or a
kernel that fails, is a result and not a crash.
"""

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.errors import reason_of
from trainer.bench.strategies import StepPacks, Strategy

LEARNING_RATE = 1e-4
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
SPREAD_WARNING = 0.2  # spread of step rates, quartile to quartile over median, beyond which a row gets a note


@dataclass(frozen=True, kw_only=True)
class Work:
    """The optimizer steps that every strategy takes."""

    steps: list[StepPacks]
    tokens: list[int]
    "Real tokens of each step."
    targets: list[int]
    "Targets of each step."
    flops: list[float]
    "Model FLOPs of each step: real tokens, and the attention pairs that documents have."


@dataclass(kw_only=True)
class Figures:
    """What one strategy came to."""

    strategy: str
    failed: str | None = None
    "Why there are no figures."
    seconds: list[float] = field(default_factory=list)
    "Of each step."
    data_s: float = 0.0
    "Of all steps, spent making batches."
    losses: list[float] = field(default_factory=list)
    "Mean loss of a target, of each step."
    tokens: int = 0
    "Real tokens of all steps, as this strategy fed them."
    slots: int = 0
    "Tokens of all steps, padding included."
    micro_batches: int = 0
    "Of all steps."
    peak_bytes: int | None = None


class Bench:
    """A model, and what it takes to run every strategy on it from the same start.

    Args:
        model: On its device.
        autocast: Whether to compute in bf16 with the weights as they are.
    """

    def __init__(self, model: Any, autocast: bool) -> None:
        self.model, self.device = model.eval(), next(model.parameters()).device  # no dropout: losses must agree
        self._autocast = autocast
        self._start = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]

    def context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext()

    def measure(self, strategy: Strategy, work: Work) -> Figures:
        """Run a strategy; its figures, or why there are none."""
        figures = Figures(strategy=strategy.name)
        try:
            self._run(strategy, work, figures)
        except (MemoryError, RuntimeError, ImportError) as error:
            full = isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in OUT_OF_MEMORY)
            figures = Figures(strategy=strategy.name, failed="out of memory" if full else f"failed: {reason_of(error)}")
        finally:
            self.model.zero_grad(set_to_none=True)
        return figures

    def _run(self, strategy: Strategy, work: Work, figures: Figures) -> None:
        release_memory(self.device)
        micro_batches = [strategy.cut(step) for step in work.steps]
        shapes = {strategy.collate(m)["input_ids"].shape: m for micros in micro_batches for m in micros}
        if self.device.type == "cpu":  # no kernel is chosen or compiled by shape there: the largest warms the memory
            shapes = dict([max(shapes.items(), key=lambda item: item[0].numel())])
        self._step(strategy, list(shapes.values()), 1, self._fresh(), Figures(strategy=""))
        optimizer = self._fresh()
        watch_memory(self.device)
        losses = []
        for micros, targets in zip(micro_batches, work.targets, strict=True):
            with stopwatch(self.device, figures.seconds):
                losses.append(self._step(strategy, micros, targets, optimizer, figures))
        figures.losses = torch.stack(losses).tolist()
        figures.peak_bytes = peak_memory(self.device)

    def _step(
        self,
        strategy: Strategy,
        micros: Sequence[Any],
        targets: int,
        optimizer: torch.optim.Optimizer,
        figures: Figures,
    ) -> Tensor:
        total = torch.zeros((), device=self.device)
        for micro in micros:
            asked = time.perf_counter()
            batch = strategy.collate(micro)
            figures.data_s += time.perf_counter() - asked
            figures.tokens += batch["num_tokens"]
            figures.slots += batch["input_ids"].numel()
            figures.micro_batches += 1
            with self.context():
                loss: Any = strategy.loss(batch, targets)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    def _fresh(self) -> torch.optim.Optimizer:
        """Put the first weights back; return an optimizer that has not stepped yet."""
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self._start, strict=True):
                parameter.copy_(start)
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)


@contextmanager
def stopwatch(device: torch.device, seconds: list[float]) -> Iterator[None]:
    """Add the time that the device was at the body to a list."""
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        yield
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    else:
        started = time.perf_counter()
        yield
        if device.type == "mps":
            torch.mps.synchronize()
        seconds.append(time.perf_counter() - started)


def release_memory(device: torch.device) -> None:
    """Give back what earlier strategies freed, what the frames of an error held too, so that it does not count here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def watch_memory(device: torch.device) -> None:
    """Start looking for the highest memory use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def peak_memory(device: torch.device) -> int | None:
    """Return the highest memory use since `watch_memory`, in bytes: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    if sys.platform != "linux":
        return None  # nothing there can be reset
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


def summarize(figures: Figures, work: Work, baseline: Figures | None, peak_flops: float | None) -> dict[str, Any]:
    """Return a row of the table as JSON-able values; speeds are medians over steps, speed-ups medians of pairs."""
    if figures.failed:
        return {"strategy": figures.strategy, "failed": figures.failed}
    rates = [tokens / s for tokens, s in zip(work.tokens, figures.seconds, strict=True)]
    flops = statistics.median(f / s for f, s in zip(work.flops, figures.seconds, strict=True))
    low, middle, high = quartiles(figures.seconds)
    rate_low, rate, rate_high = quartiles(rates)
    pairs = zip(baseline.seconds, figures.seconds, strict=True) if baseline and not baseline.failed else ()
    speedups = [theirs / ours for theirs, ours in pairs]
    steps = len(figures.seconds)
    return {
        "strategy": figures.strategy,
        "tokens_per_step": figures.tokens / steps,
        "padding": 1 - figures.tokens / figures.slots,
        "micro_batches_per_step": figures.micro_batches / steps,
        "step_s": {"median": middle, "quartiles": [low, high], "all": figures.seconds},
        "tokens_per_s": rate,
        "speedup": statistics.median(speedups) if speedups else None,
        "peak_bytes": figures.peak_bytes,
        "data_share": figures.data_s / sum(figures.seconds),
        "loss": figures.losses[-1],
        "losses": figures.losses,
        "tflops_per_s": flops / 1e12,
        "mfu": flops / peak_flops if peak_flops else None,
        "noisy": (rate_high - rate_low) / rate > SPREAD_WARNING,
    }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the first, second and third quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, middle, high


def disagreements(rows: list[dict[str, Any]], tolerance: float) -> dict[str, float]:
    """Compare the losses of every row, step by step, with those of the first.

    Returns:
        Largest relative difference of the rows where it is above the tolerance, or not a number.
    """
    compared = [row for row in rows if "losses" in row]
    found = {}
    for row in compared[1:]:
        pairs = zip(row["losses"], compared[0]["losses"], strict=True)
        differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        if not all(each <= tolerance for each in differences):  # so that not-a-number is found too
            found[row["strategy"]] = max(differences)
    return found
