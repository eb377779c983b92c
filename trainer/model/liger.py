"""liger-kernel on a GPU where it is installed: its layers in place of a model's own, and its fused loss.

`auto` uses what is there and says what is not; `on` insists. The layers are put in before the start-up probe, which
thereby covers them, and only stay if a short row has the same logits with and without them: liger's feed-forward layers
compute SiLU whatever activation the model has. The fused loss counts targets with two host syncs per micro-batch; it
has no weights per token, and serves plain heads only, since it would leave out a head's scale or soft-cap.
"""

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from shards.errors import ModelError
from trainer.model.backends.foreign import import_reason
from trainer.model.probe import large_weights, logits_of_a_row

IN_PLACE = "liger kernels: in place"


def unusable_reason() -> str | None:
    """Return why liger-kernel cannot be used: it is not installed, or cannot be imported."""
    return import_reason("liger_kernel.transformers.monkey_patch", "liger-kernel")


def replace_layers(model: Any, mode: str, device: torch.device, *, random: bool = False) -> list[str]:
    """Put liger's norms, rotary embeddings and feed-forward layers into a model, in place.

    Args:
        model: Its attention is `packrow`, or it is one that transformers runs by itself.
        random: Whether the weights are fresh.

    Returns:
        One line that says what was done.

    Raises:
        ModelError: `mode` is `on` and liger-kernel cannot be used, does not know the model, or changes its results.
    """
    if mode == "off":
        return []
    if device.type != "cuda":
        reason: str | None = f"liger kernels run on CUDA devices only, the model is on {device.type}"
    else:
        reason = unusable_reason() or _replace(model, random)
    if reason is None:
        return [IN_PLACE]
    if mode == "on":
        raise ModelError(f'`liger="on"`: {reason}; expected a model that it serves. Use `liger="auto"`.')
    return [f"liger kernels: passed over, {reason}"]


def _replace(model: Any, random: bool) -> str | None:
    """Put the layers in; where they change the logits, take them out again and return the reason."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"liger-kernel does not know models of type {model.config.model_type}"
    with torch.no_grad(), large_weights(model, random):
        undo = _snapshot(model)
        before = logits_of_a_row(model)
        put_in(model)
        off = float((logits_of_a_row(model) - before).abs().mean() / before.std())
    exact = next(model.parameters()).dtype == torch.float32
    if off <= (5e-3 if exact else 5e-2):  # TF32 and bf16 round otherwise
        return None
    undo()
    activation = getattr(model.config.get_text_config(), "hidden_act", None)
    return f"its layers change the model's logits by {off:.1e} of their spread (activation {activation})"


def put_in(model: Any) -> None:
    """Put liger's layers into a model of a type that it knows, unchecked."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)


def _snapshot(model: nn.Module) -> Callable[[], None]:
    """Return what undoes changes to a model's modules and to the functions of the file that defines it."""
    modules = {module: dict(vars(module)) for module in model.modules()}
    home = vars(sys.modules[type(model).__module__])
    functions = dict(home)

    def undo() -> None:
        for module, before in modules.items():
            vars(module).clear()
            vars(module).update(before)
        home.update(functions)

    return undo


def fused_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float) -> Tensor:
    """Sum token losses of a linear head with liger's kernel; arguments as for `loss.linear_cross_entropy`."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # once, where the kernel would cast the whole head in every chunk
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
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
