"""Optimizers by name, the learning rate as a pure function of the step, and gradient norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from shards.errors import PackError
from trainer.config import TrainConfig
from trainer.model.loss import unwrap


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


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Make the optimizer of a run over the trainable parameters; vectors (norms, biases) get no weight decay.

    Raises:
        PackError: Nothing is trainable, or what the optimizer needs is not installed.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise PackError("`freeze`: every parameter is frozen; expected some to train. Narrow the patterns.")
    if config.optimizer == "muon":
        return _muon_with_adamw(model, trainable, config)
    return _MAKERS[config.optimizer](_groups(trainable, config), config)


def _groups(parameters: Iterable[nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """Return parameters in groups of an optimizer: those with weight decay, and vectors without it."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def _adamw_8bit(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """Make AdamW whose moments are 8 bit numbers with a scale for each 256; tensors below 4,096 numbers stay fp32."""
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise PackError(
            '`optimizer="adamw-8bit"`: bitsandbytes is not installed. Run pip install bitsandbytes.'
        ) from error
    optimizer: torch.optim.Optimizer = optim.AdamW8bit(  # type: ignore[attr-defined, no-untyped-call]
        groups, lr=config.lr, betas=(config.beta1, config.beta2)
    )
    return optimizer


def _adafactor(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """Make Adafactor with the learning rates of the run, as transformers' Trainer does: no rates of its own."""
    from transformers import Adafactor

    return Adafactor(  # type: ignore[no-untyped-call]
        groups, lr=config.lr, scale_parameter=False, relative_step=False, warmup_init=False
    )


_MAKERS: dict[str, Callable[[list[dict[str, Any]], TrainConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw-8bit": _adamw_8bit,
    "adafactor": _adafactor,
}


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of linear layers, AdamW for all else, as one optimizer.

    Muon scales its steps to the size of AdamW's (`match_rms_adamw`), so that one learning rate serves both.
    """

    def __init__(self, matrices: list[dict[str, Any]], rest: list[dict[str, Any]], config: TrainConfig) -> None:
        super().__init__([*matrices, *rest], {"lr": config.lr})
        muon = torch.optim.Muon(matrices, lr=config.lr, adjust_lr_fn="match_rms_adamw")
        self._parts: list[torch.optim.Optimizer] = [muon]
        if rest:
            self._parts.append(_adamw(rest, config))
        # one list of groups and one state: whoever sets a rate or loads a checkpoint sees one optimizer
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  # none is ever given
        """Move the parameters by their gradients."""
        for part in self._parts:
            part.step()


def _muon_with_adamw(model: nn.Module, trainable: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise PackError(
            f'`optimizer="muon"`: torch {torch.__version__} has no Muon; expected one that has. '
            "Run pip install --upgrade torch."
        )
    head = unwrap(model).get_output_embeddings()
    inputs = unwrap(model).get_input_embeddings()
    apart = {id(each.weight) for each in (head, inputs) if each is not None}
    linear = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module.weight) not in apart
    }
    matrices = [p for p in trainable if id(p) in linear]
    if not matrices:
        raise PackError(
            '`optimizer="muon"`: no matrix of a linear layer is trained; expected some. Use `optimizer="adamw"`.'
        )
    rest = [p for p in trainable if id(p) not in linear]
    return MuonWithAdamW(_groups(matrices, config), _groups(rest, config), config)


def skips_bad_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer leaves weights alone where its `found_inf` says so, on the device; others must be asked."""
    return isinstance(optimizer, torch.optim.AdamW)


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
