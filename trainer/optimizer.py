"""AdamW, the learning rate as a pure function of the step, and gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shards.errors import PackError
from trainer.config import TrainConfig


def learning_rate(step: int, num_steps: int, config: TrainConfig) -> float:
    """Return the learning rate of one step.

    Args:
        step: The step about to be taken, from 0.
        num_steps: Steps of the whole run.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    left = max(1, num_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / left)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        decay = config.decay_steps or max(1, num_steps // 5)
        progress = min(1.0, max(0.0, (step - (num_steps - decay)) / decay))
    scale = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * scale


def describe_schedule(step: int, num_steps: int, config: TrainConfig) -> str:
    """Say how the learning rate goes on from one step, such as "cosine from 5.00e-03 to 0.00e+00 at step 8"."""
    if step >= num_steps:
        return f"over after step {num_steps:,}"
    now, end = (f"{learning_rate(at, num_steps, config):.2e}" for at in (step, num_steps))
    if step < config.warmup_steps:
        rise = f"warm-up from {now} to {config.lr:.2e} at step {config.warmup_steps:,}"
        if config.warmup_steps >= num_steps:
            return f"{rise}, beyond the last step {num_steps:,}"
        return f"{rise}, then {describe_schedule(config.warmup_steps, num_steps, config)}"
    if config.schedule == "constant":
        return f"constant at {now} until step {num_steps:,}"
    if config.schedule != "wsd":
        return f"{config.schedule} from {now} to {end} at step {num_steps:,}"
    decay = num_steps - (config.decay_steps or max(1, num_steps // 5))
    fall = f"linear from {now} to {end} at step {num_steps:,}"
    return fall if step >= decay else f"constant at {now} until step {decay:,}, then linear to {end} at {num_steps:,}"


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Make fused AdamW over the trainable parameters; vectors (norms, biases) get no weight decay.

    Raises:
        PackError: Nothing is trainable.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise PackError("`freeze`: every parameter is frozen; expected some to train. Narrow the patterns.")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2), fused=True
    )


def gradient_norm(parameters: Iterable[nn.Parameter], clip: float) -> torch.Tensor:
    """Return the norm of all gradients, over all processes, after scaling them down to at most `clip` (0: leave them).

    Stays on the device: reading the value is the caller's choice.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if clip > 0:
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return norm
