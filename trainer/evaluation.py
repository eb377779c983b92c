"""Loss on packs that are not trained on: summed over tokens, so neither packing nor processes change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shards import Dataset
from trainer.distributed import World, total
from trainer.feeding.feed import feed, whole_dataset
from trainer.model.loss import PackedLM


def evaluate(
    module: nn.Module,
    lm: PackedLM,
    dataset: Dataset,
    world: World,
    *,
    tokens_per_batch: int,
    static_shapes: bool = False,
    autocast: AbstractContextManager[Any],
) -> dict[str, float]:
    """Score every target of a dataset once.

    Args:
        module: What to call: `lm`, or `lm` inside DDP or FSDP2.
        dataset: Packs to score, with at least one target.
        tokens_per_batch: Tokens in a batch.

    Returns:
        `eval_loss`, mean loss of a target in nats, weighted where targets have weights; `eval_perplexity`;
        `eval_targets`.
    """
    targets = int(dataset.index.num_targets.sum(dtype="int64"))
    weighting, lm.weighting = lm.weighting, "token"
    module.eval()
    summed = torch.zeros((), dtype=torch.float64, device=world.device)
    batches = whole_dataset(dataset, tokens_per_batch, world.rank, world.size)
    with torch.no_grad(), autocast:
        for batch, _ in feed(
            dataset, batches, tokens_per_batch, world.device, static_shapes, rectangles=lm.needs_rectangles
        ):
            summed += module(batch)
    if isinstance(module, FSDPModule):
        module.reshard()  # no backward pass does it here; a gathered model has other parameters than the optimizer
    module.train()
    lm.weighting = weighting
    loss = total([summed], world)[0] / _weight_of(dataset)
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0)), "eval_targets": targets}


def evaluate_all(
    module: nn.Module,
    lm: PackedLM,
    datasets: Mapping[str, Dataset],
    world: World,
    *,
    tokens_per_batch: int,
    static_shapes: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, float]:
    """Score every target of several datasets once.

    Args:
        module: As for `evaluate`.
        datasets: By name; "" for a single one that has none.
        tokens_per_batch: Tokens in a batch; more where a dataset's packs are larger.
        autocast: Makes the context in which forward runs.

    Returns:
        As `evaluate`, over the targets of all datasets; and `eval_loss/NAME`, `eval_targets/NAME` of each that has one.
    """
    summed, targets, weight = 0.0, 0, 0.0
    figures: dict[str, float] = {}
    for name, dataset in datasets.items():
        one = evaluate(
            module, lm, dataset, world, tokens_per_batch=max(tokens_per_batch, dataset.seq_len),
            static_shapes=static_shapes, autocast=autocast(),
        )  # fmt: skip
        here = _weight_of(dataset)
        summed, targets, weight = summed + one["eval_loss"] * here, targets + int(one["eval_targets"]), weight + here
        if name:
            figures |= {f"eval_loss/{name}": one["eval_loss"], f"eval_targets/{name}": one["eval_targets"]}
    loss = summed / weight
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0)), "eval_targets": targets, **figures}


def _weight_of(dataset: Dataset) -> float:
    """Return what the summed loss of a dataset is divided by: its targets, or the sum of their weights."""
    weights = dataset.index.weight_sum
    return float(dataset.index.num_targets.sum(dtype="int64") if weights is None else weights.sum())
