"""flash-attn's kernels: version 4 (`flash_attn.cute`), 3 (`flash_attn_interface`) and 2 (`flash_attn`)."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.backends.foreign import import_reason
from trainer.model.backends.interface import Needs

_MAX_HEAD_DIM = 256


def flash_reason(needs: Needs, *, capability: tuple[int, int]) -> str | None:
    """Return why no kernel of the flash family can serve these needs, None where they can.

    Args:
        capability: The oldest GPU that the kernel runs on.
    """
    if needs.device.type != "cuda":
        return f"runs on CUDA devices only, the model is on {needs.device.type}"
    if (found := torch.cuda.get_device_capability(needs.device)) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}, this GPU has {found[0]}.{found[1]}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16 only, not in {str(needs.dtype).removeprefix('torch.')}"
    if max(needs.heads) > _MAX_HEAD_DIM:
        return f"takes heads up to {_MAX_HEAD_DIM} wide, these are {max(needs.heads)}"
    return None


def pad_heads(*heads: Tensor) -> list[Tensor]:
    """Widen all heads to one multiple of 8 with zeros, which change no score and are cut off the result."""
    width = -(-max(x.shape[-1] for x in heads) // 8) * 8
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in heads]


@torch.compiler.disable  # traced, it would break the graph inside CuTe's own compiler, five times a layer
def flash_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend by flash-attn-4; arguments as for `Backend`."""
    from flash_attn.cute import flash_attn_varlen_func

    value_dim = v.shape[-1]
    q, k, v = pad_heads(q, k, v)
    # Keywords only: the fourth positional argument is `qv` here and `cu_seqlens_q` in flash-attn 2.
    out = flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, softmax_scale=scale, causal=True,
        window_size=(None, None) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0, learnable_sink=None if sinks is None else sinks.to(q.dtype),
    )  # fmt: skip
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)[..., :value_dim]


def flash_4_reason(needs: Needs) -> str | None:
    """Return why the kernel cannot serve these needs, None where it can."""
    if reason := flash_reason(needs, capability=(9, 0)) or import_reason("flash_attn.cute", "flash-attn-4"):
        return reason
    width = max(needs.heads)
    if torch.cuda.get_device_capability(needs.device)[0] > 9 and 128 < width < _MAX_HEAD_DIM:
        return f"takes heads up to 128 or of exactly 256 on this GPU, these are {width}"
    return None


@torch.compiler.disable  # its operators are registered without shape functions for every version of torch
def flash_3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """Attend by flash-attn 3; arguments as for `Backend`."""
    from flash_attn_interface import flash_attn_varlen_func

    value_dim = v.shape[-1]
    q, k, v = pad_heads(q, k, v)
    out = flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, softmax_scale=scale, causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0), softcap=softcap or 0.0,
    )  # fmt: skip
    # Its first releases return the log-sum-exp too.
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)[..., :value_dim]


def flash_3_reason(needs: Needs) -> str | None:
    """Return why the kernel cannot serve these needs, None where it can."""
    if needs.sinks:
        return "has no attention sinks"
    if reason := flash_reason(needs, capability=(8, 0)):
        return reason
    if (major := torch.cuda.get_device_capability(needs.device)[0]) > 9:
        return f"has no kernels for compute capability {major}.x; flash-attn-4 has"
    return import_reason("flash_attn_interface", "flash-attn-3")


def flash_2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """Attend by flash-attn 2; arguments as for `Backend`."""
    from flash_attn import flash_attn_varlen_func

    value_dim = v.shape[-1]
    q, k, v = pad_heads(q, k, v)
    out = flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, dropout_p=0.0, softmax_scale=scale, causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0), softcap=softcap or 0.0,
    )  # fmt: skip
    return cast(Tensor, out)[..., :value_dim]


def flash_2_reason(needs: Needs) -> str | None:
    """Return why the kernel cannot serve these needs, None where it can."""
    if needs.sinks:
        return "has no attention sinks"
    return flash_reason(needs, capability=(8, 0)) or import_reason("flash_attn.flash_attn_interface", "flash-attn")
