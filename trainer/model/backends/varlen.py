"""torch's own variable-length attention, flash-attn 2's kernels compiled into torch."""

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from trainer.model.backends.flash import flash_reason, pad_heads
from trainer.model.backends.foreign import import_reason
from trainer.model.backends.interface import Needs


def _find_torch_varlen() -> tuple[Callable[..., Tensor], frozenset[str]] | None:
    """Return torch's function and its parameters' names, which differ between 2.11 and 2.14; None before 2.11."""
    if import_reason("torch.nn.attention.varlen", "torch") is not None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    names = frozenset(inspect.signature(varlen_attn).parameters)
    return (cast(Callable[..., Tensor], varlen_attn), names) if {"scale", "window_size"} <= names else None


_TORCH_VARLEN = _find_torch_varlen()  # now, not when asked: a compiler would trace the search into every layer


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """Attend by torch's kernels; arguments as for `Backend`."""
    assert _TORCH_VARLEN is not None
    function, names = _TORCH_VARLEN
    value_dim, grouped = v.shape[-1], q.shape[1] != k.shape[1]
    q, k, v = pad_heads(q, k, v)
    # 2.11 takes fewer key heads as they are; later versions want to be told.
    extra = {"enable_gqa": True} if grouped and "enable_gqa" in names else {}
    left = -1 if sliding_window is None else sliding_window - 1
    out = function(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=(left, 0), **extra)
    return out[..., :value_dim]


def unsupported_reason(needs: Needs) -> str | None:
    """Return why the kernel cannot serve these needs, None where it can."""
    if _TORCH_VARLEN is None:
        return f"torch {torch.__version__} has no varlen_attn with a window; 2.11 or newer has"
    if needs.sinks or needs.softcap:
        return f"has no {'attention sinks' if needs.sinks else 'soft-cap'}"
    return flash_reason(needs, capability=(8, 0))
