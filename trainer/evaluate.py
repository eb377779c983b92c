"""Loss on packs that are not trained on: summed over tokens, so neither packing nor processes change it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shards import Dataset
from trainer.distributed import World, total
from trainer.loader import feed, whole_dataset
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
        `eval_loss`, mean loss of a target in nats; `eval_perplexity`; `eval_targets`.
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
    loss = total([summed], world)[0] / targets
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0)), "eval_targets": targets}
