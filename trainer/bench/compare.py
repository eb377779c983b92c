"""All strategies over the same steps: rows of figures, losses that disagree, and what else there is to say."""

import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shards.cost import ModelCost, attention_pairs
from trainer.bench.strategies import (
    STRATEGIES,
    MakeStrategy,
    Sizes,
    SkippedStrategy,
    StepPacks,
    make_strategies,
)
from trainer.bench.timing import Bench, Figures, Work, disagreements, summarize
from trainer.metrics import cost_of, peak_flops
from trainer.model.loading import LoadedModel

BASELINE = "padded-longest"
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}  # relative; a full leak moves the loss of random weights by about 1e-3
COMPUTED = {"fp32": torch.float32, "bf16": torch.bfloat16}
Result = dict[str, Any]


def run_comparison(
    names: Sequence[str],
    loaded: LoadedModel,
    steps: Sequence[StepPacks],
    sizes: Sizes,
    dtype: str,
    tell: Callable[[str], None] = lambda line: None,
    known: Mapping[str, MakeStrategy] = STRATEGIES,
) -> Result:
    """Run every strategy from the same weights over the same steps.

    Args:
        names: Keys of `known`.
        loaded: The model that all of them train.
        steps: Documents of each step.
        sizes: Of micro-batches.
        dtype: "fp32", or "bf16" for autocast.
        tell: Takes a line of progress.
        known: What makes the strategies of each name.

    Returns:
        `machine`, `steps` (what they hold), `settings`, `rows` (one a strategy), `disagreements` (largest relative
        difference by strategy, where its losses differ from the first row's), `notes`.
    """
    device = next(loaded.model.parameters()).device
    work, bench = count_work(steps, cost_of(loaded.model)), Bench(loaded.model, dtype == "bf16")
    measured = []
    for strategy in make_strategies(names, loaded, sizes, COMPUTED[dtype], known):
        tell(f"{strategy.name} …")
        if isinstance(strategy, SkippedStrategy):
            measured.append(Figures(strategy=strategy.name, failed=f"not run: {strategy.reason}"))
            continue
        measured.append(bench.measure(strategy, work))
    baseline = next((figures for figures in measured if figures.strategy == BASELINE), None)
    rows = [summarize(figures, work, baseline, peak_flops(device)) for figures in measured]
    return {
        "machine": describe_machine(device),
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "steps": {
            "number": len(work.steps),
            "documents": sum(len(step.documents) for step in work.steps),
            "packs": sum(len(step.packs) for step in work.steps),
            "tokens": sum(work.tokens),
            "targets": sum(work.targets),
        },
        "settings": {
            "seq_len": sizes.seq_len, "batch": sizes.batch, "tokens_per_batch": sizes.tokens_per_batch, "dtype": dtype,
        },
        "rows": rows,
        "disagreements": disagreements(rows, TOLERANCE[dtype]),
        "notes": [*_full(work, sizes.seq_len), *_note_noise(rows)],
    }  # fmt: skip


def count_work(steps: Sequence[StepPacks], cost: ModelCost) -> Work:
    """Count what each step holds: real tokens, targets, and the FLOPs of tokens and attention pairs."""
    work = Work(steps=list(steps), tokens=[], targets=[], flops=[])
    for step in steps:
        lengths = np.array([len(ids) for ids, *_ in step.documents], np.int64)
        pairs = int(attention_pairs(lengths).sum())
        windowed = int(attention_pairs(lengths, cost.sliding_window).sum())
        work.tokens.append(int(lengths.sum()))
        work.targets.append(max(1, sum(int(document.loss_mask.sum()) for document in step.documents)))
        work.flops.append(cost.flops(work.tokens[-1], pairs, windowed))
    return work


def describe_machine(device: torch.device) -> Result:
    """Return what a figure depends on beside the code: device, threads, versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    versions = {package: _version(package) for package in ("torch", "transformers", "numpy", "shardpack")}
    threads = torch.get_num_threads()
    return {"device": device.type, "name": name, "threads": threads, "python": platform.python_version(), **versions}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return "not installed"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _full(work: Work, seq_len: int) -> list[str]:
    lengths = [len(ids) for step in work.steps for ids, *_ in step.documents]
    full = lengths.count(seq_len)
    if 2 * full <= len(lengths):
        return []
    return [
        f"{full} of {len(lengths)} documents are {seq_len} tokens long: little is padded. "
        "A larger --seq-len compares more"
    ]


def _note_noise(rows: list[Result]) -> list[str]:
    names = [row["strategy"] for row in rows if row.get("noisy")]
    return (
        [f"{', '.join(names)}: step rates spread widely; run again on a quiet machine, or with more --steps"]
        if names
        else []
    )
