"""Experts in the type that autocast asks for: `grouped_mm` is none of the operations that autocast knows.

Under autocast to bf16, transformers' experts would compute in the fp32 of their weights, which on a GPU also leaves the
grouped kernel for a loop with a host sync per product.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def follow_autocast() -> None:
    """Let transformers' grouped product of experts take part in autocast, in this process."""
    from transformers.integrations import moe

    original: Any = moe._grouped_mm
    if not hasattr(original, "follows_autocast"):
        moe._grouped_mm = _following(original)


def _following(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input, weight = input.to(dtype), weight.to(dtype)
        return original(input, weight, offs)

    grouped_mm.follows_autocast = True  # type: ignore[attr-defined]
    return grouped_mm
