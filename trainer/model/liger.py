"""liger-kernel on a GPU where it is installed: its layers in place of a model's own, and its fused loss.

`auto` uses what is there and says what is not; `on` insists. The layers are put in before the start-up probe, which
thereby covers them. The fused loss counts targets with one host sync per micro-batch; it has no weights per token, and
serves plain heads only, since it would leave out a head's scale or soft-cap.
"""

import importlib.util
from typing import Any, cast

import torch
from torch import Tensor

from shards.errors import ModelError


def replace_layers(model: Any, mode: str, device: torch.device) -> list[str]:
    """Put liger's norms, rotary embeddings and feed-forward layers into a model, in place.

    Returns:
        One line that says what was done.

    Raises:
        ModelError: `mode` is `on` and liger-kernel cannot be used, or does not know the model.
    """
    if mode == "off":
        return []
    if device.type != "cuda":
        reason = f"liger kernels run on CUDA devices only, the model is on {device.type}"
    elif not importlib.util.find_spec("liger_kernel"):
        reason = "liger-kernel is not installed"
    else:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

        if model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN:
            _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
            return ["liger kernels: in place"]
        reason = f"liger-kernel does not know models of type {model.config.model_type}"
    if mode == "on":
        raise ModelError(f'`liger="on"`: {reason}; expected a model that it serves. Use `liger="auto"`.')
    return [f"liger kernels: passed over, {reason}"]


def fused_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float) -> Tensor:
    """Sum token losses of a linear head with liger's kernel; arguments as for `loss.linear_cross_entropy`."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        lse_square_scale=z_loss,
        reduction="sum",
        accum_dtype=torch.float32,  # dozens of chunks add up: in bf16 the small ones would be lost
    )
    return cast(Tensor, loss)
