"""The training loop, top to bottom: what `pack train` does, in order.

Each concern beside it has its own file: which packs and when (`loader`), what a loss is (`loss`), how rows attend
(`attention`), what a checkpoint holds (`checkpoint`). Between two log lines the host only queues work: it reads nothing
back from the device (but for liger's fused loss, which does), and the divisor of the loss comes from the dataset's
index, not from a reduction.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from shards import PackError
from shards.lock import Lock
from trainer import distributed
from trainer.batch import Batch
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.evaluation import evaluate_all
from trainer.interrupt import Interrupt
from trainer.loader import Step
from trainer.metrics import memory_gib, peak_flops
from trainer.model.backends.agreement import to_json
from trainer.optimizer import gradient_norm, learning_rate, skips_bad_steps
from trainer.resume import locked
from trainer.run import Run, set_up
from trainer.saving.export import export


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    steps: int
    "Optimizer steps taken, earlier attempts included."
    loss: float
    "Mean loss of a target over the steps of the last line of metrics."
    eval_loss: float | None
    "Mean loss of an evaluation target after the last step."
    model_dir: Path
    "The exported model."
    is_main: bool = True
    "Whether this process is the one that reports."


@dataclass
class LogInterval:
    """Figures gathered since the last line of metrics; the loss stays on the device."""

    loss: torch.Tensor
    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    waited: float = 0.0
    tokens: int = 0
    targets: int = 0
    divisor: float = 0
    "What the sum of losses is divided by: targets, or documents where these weigh the same."
    flops: float = 0.0
    source_losses: torch.Tensor | None = None
    "Sum of token losses by source, on the device; None where there is one source."
    source_tokens: np.ndarray | int = 0
    source_targets: np.ndarray | int = 0
    straggler: float = 0.0
    fetched_bytes: int = 0
    "Bytes that the dataset had fetched when this interval began."


def train(config: TrainConfig) -> TrainResult:
    """Train a model on a dataset; under torchrun, every process calls this.

    Raises:
        PackError: Model, dataset and settings do not fit, or a gradient stopped being finite.
    """
    world = distributed.start(config.device)
    try:
        with locked(Path(config.out), world) as lock:
            return _train(config, world, lock)
    finally:
        distributed.stop(world)


def _train(config: TrainConfig, world: World, lock: Lock | None) -> TrainResult:
    run = set_up(config, world)
    run.lock = lock
    with closing(run.metrics):
        optimize(run)
        figures = {"steps": run.step, "loss": run.loss, "eval loss": run.eval_loss}
        model_dir, notes = export(run.model, Path(config.out), run.dataset, run.card_config, world, figures)
        for note in notes:
            run.metrics.say(note)
        return TrainResult(run.step, run.loss, run.eval_loss, model_dir, world.is_main)


def optimize(run: Run) -> None:
    """Take every step that is left, with everything that happens between steps.

    Raises:
        KeyboardInterrupt: A signal asked for it (`trainer.interrupt`); the step at hand was finished and saved.
    """
    config, interval = run.config, LogInterval(torch.zeros((), device=run.world.device))
    with closing(run.loader.forever()) as batches, profiler(run) as note_step, Interrupt(run.world) as interrupt:
        while run.step < run.num_steps:
            norm, rate = take_step(run, batches, interval)
            run.step += 1
            note_step()
            log_now = run.due(config.log_every) or run.step == 1
            save_now, evaluate_now = (
                run.due(config.save_every),
                bool(run.eval_datasets) and run.due(config.eval_every),
            )
            sample_now = run.sampler is not None and run.due(config.sample_every)
            stop_now = interrupt.asked()
            if log_now or save_now or evaluate_now or sample_now or stop_now or run.world.device.type == "cpu":
                stop_if_not_finite(run)  # reading from a GPU waits for it, so not at every step there
            if log_now:
                log(run, interval, norm, rate)
                interval = LogInterval(torch.zeros((), device=run.world.device), fetched_bytes=fetched_bytes(run))
            pause = time.perf_counter()
            is_best = evaluate_now and run_evaluation(run)
            if sample_now:
                run_samples(run)
            if save_now or is_best or stop_now:
                save(run, is_best)
            if stop_now:
                break
            interval.started += time.perf_counter() - pause  # figures are of training alone
        run.checkpoints.close()  # signals are still noted: one that comes now does not cut the last save short
        if interrupt.asked_of_any():
            raise KeyboardInterrupt


def take_step(run: Run, batches: Iterator[Batch], interval: LogInterval) -> tuple[torch.Tensor, float]:
    """Accumulate the gradients of one step over its micro-batches, and move the weights.

    Two processes, four packs of 30, 50, 60 and 20 targets: every micro-batch returns its sum of losses / (160 / 2),
    gradients add up over micro-batches and are averaged over processes, so the gradient of the step is that of
    (sum of all 160 losses) / 160, however the packs were dealt.

    Returns:
        Gradient norm before clipping, on the device; learning rate.
    """
    config, world = run.config, run.world
    for micro in range(run.loader.batches_per_step):
        asked = time.perf_counter()
        batch = next(batches)
        interval.waited += time.perf_counter() - asked
        step: Step = batch["step"]
        is_last = micro == run.loader.batches_per_step - 1
        if run.loader.by_source:
            run.lm.token_losses = torch.zeros(batch["shift_labels"].numel(), device=world.device)
        with nullcontext() if is_last else run.parallel.accumulate():
            with run.autocast():
                # processes average their gradients; the divisor counts the targets of all of them
                loss = run.parallel.module(batch, step.divisor / world.size)
            loss.backward()
        interval.loss += loss.detach() * (step.divisor / world.size)  # back to a sum over targets
        if run.lm.token_losses is not None:
            if interval.source_losses is None:
                interval.source_losses = torch.zeros(len(run.loader.sources.names), device=world.device)
            interval.source_losses.index_add_(0, batch["sources"], run.lm.token_losses)
            run.lm.token_losses = None
        interval.flops += run.cost.flops(batch["num_tokens"], batch["attention_pairs"], batch["window_pairs"])
    norm = gradient_norm(run.model.parameters(), config.clip)
    run.bad_step = torch.where((run.bad_step < 0) & ~torch.isfinite(norm), run.step, run.bad_step)
    rate = learning_rate(run.step, run.num_steps, config)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    if skips_bad_steps(run.optimizer):
        run.optimizer.found_inf = (run.bad_step >= 0).float()  # type: ignore[attr-defined]
        run.optimizer.step()
    elif int(run.bad_step) < 0:  # waits for the device
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    interval.steps += 1
    interval.tokens += step.num_tokens
    interval.targets += step.num_targets
    interval.divisor += step.divisor
    interval.source_tokens = interval.source_tokens + step.source_tokens
    interval.source_targets = interval.source_targets + step.source_targets
    interval.straggler += step.straggler
    return norm, rate


def log(run: Run, interval: LogInterval, norm: torch.Tensor, rate: float) -> None:
    """Write a line of metrics; waits for the device."""
    by_source = () if interval.source_losses is None else interval.source_losses.unbind()
    loss, flops, *source_losses = distributed.total([interval.loss, interval.flops, *by_source], run.world)
    elapsed = time.perf_counter() - interval.started
    run.loss = loss / interval.divisor
    peak = peak_flops(run.world.device)
    flops_per_s = flops / elapsed / run.world.size
    run.metrics.write(
        {
            "step": run.step,
            "epoch": round(run.step / run.loader.steps_per_epoch, 4),
            "loss": run.loss,
            "lr": rate,
            "grad_norm": float(norm),
            "tokens": interval.tokens,
            "targets": interval.targets,
            "tokens_per_s": interval.tokens / elapsed / run.world.size,
            "tflops_per_s": flops_per_s / 1e12,
            "mfu": flops_per_s / peak if peak else None,
            "data_wait": interval.waited / elapsed,
            "step_s": elapsed / interval.steps,
            "memory_gib": memory_gib(run.world.device),
            "straggler": interval.straggler / interval.steps,
            **_figures_of_fetching(run, interval, elapsed),
            **_figures_by_source(run.loader.sources.names, source_losses, interval),
        }
    )


def fetched_bytes(run: Run) -> int:
    """Return the bytes that this process has fetched of the dataset's shards."""
    return 0 if run.dataset.mirror is None else run.dataset.mirror.fetched_bytes


def _figures_of_fetching(run: Run, interval: LogInterval, elapsed: float) -> dict[str, float]:
    """Return the MB/s that this process fetched, where the dataset is a URL."""
    if run.dataset.mirror is None:
        return {}
    return {"fetched_mb_per_s": (fetched_bytes(run) - interval.fetched_bytes) / elapsed / 1e6}


def _figures_by_source(names: list[str], losses: list[float], interval: LogInterval) -> dict[str, float]:
    """Return the mean loss of a target, and the tokens, of each source that had any.

    Without weights and z-loss the means add up: their sum, each times its targets, is `loss` times `targets`.
    """
    figures: dict[str, float] = {}
    if losses:
        tokens, targets = np.asarray(interval.source_tokens), np.asarray(interval.source_targets)
        for name, loss, num_tokens, num_targets in zip(names, losses, tokens.tolist(), targets.tolist(), strict=True):
            if num_tokens:
                figures[f"tokens/{name}"] = num_tokens
            if num_targets:
                figures[f"loss/{name}"] = loss / num_targets
    return figures


def run_evaluation(run: Run) -> bool:
    """Score the evaluation datasets.

    Returns:
        Whether this is the lowest loss so far, over the targets of all of them.
    """
    figures = evaluate_all(
        run.parallel.module, run.lm, run.eval_datasets, run.world, tokens_per_batch=run.loader.tokens_per_batch,
        static_shapes=run.config.compile, autocast=run.autocast,
    )  # fmt: skip
    run.eval_loss = figures["eval_loss"]
    run.metrics.write({"step": run.step, **figures})
    is_best = run.eval_loss < run.best
    run.best = min(run.best, run.eval_loss)
    return is_best


def run_samples(run: Run) -> None:
    """Let the model go on from the prompts of the run."""
    assert run.sampler is not None
    samples = run.sampler.sample(run.parallel.module, run.lm, run.world.device, run.autocast)
    run.metrics.write_samples(run.step, samples)


def save(run: Run, is_best: bool = False) -> None:
    """Save a checkpoint of the steps taken so far."""
    if run.lock is not None:
        run.lock.check()
    facts = {
        "step": run.step,
        "num_steps": run.num_steps,
        "loader": run.loader.state_at(run.step),
        "loss": run.loss,
        "best": run.best,
        "eval_loss": run.eval_loss,
        "attention": to_json(run.lm.backend),
        "config": run.config.to_dict(),
    }
    run.checkpoints.save(run.step, run.model, run.optimizer, facts, is_best)


def stop_if_not_finite(run: Run) -> None:
    """Stop before a gradient that is not finite reaches the weights: they are still those of the step before.

    Raises:
        PackError: Such a step was found. Its packs and documents are in `not-finite.json`, the state is saved.
    """
    bad = int(run.bad_step)
    if bad < 0:
        return
    run.step = bad
    save(run)
    run.checkpoints.close()
    file = Path(run.config.out) / "not-finite.json"
    packs = sorted({int(pack) for pack in run.loader.packs_of(bad)})
    if run.world.is_main:
        documents = {
            pack: [f"window {i >> 32}, record {i & 0xFFFFFFFF}" for i in run.dataset[pack]["doc_ids"].tolist()]
            for pack in packs
        }
        file.write_text(json.dumps({"step": bad + 1, "documents_by_pack": documents}, indent=1))
    raise PackError(
        f"step {bad + 1}: the gradient is not finite; expected a number. Its packs are {', '.join(map(str, packs[:8]))}"
        f"{' and more' if len(packs) > 8 else ''}: {file} names them and their documents. The weights before it "
        "are saved. Look at the packs with pack show, or resume with a lower `lr`."
    )


@contextmanager
def profiler(run: Run) -> Iterator[Callable[[], None]]:
    """Yield what to call after each step: steps 3 to 5 of this attempt are traced where the run asks for it."""
    if not (run.config.profile and run.world.is_main):
        yield lambda: None
        return
    folder = Path(run.config.out) / "profile"
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's profiler prints marks of its own on the terminal
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(skip_first=1, wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(folder / "trace.json")),
    ) as profile:
        yield profile.step
