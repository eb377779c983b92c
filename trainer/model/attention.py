"""One attention function for packed rows, `packrow`, and the backends behind it.

Registered with transformers' `AttentionInterface` and with no mask function, so that transformers builds no mask at all
(0 host syncs per forward; its own packed paths cost 1 to 9). The boundaries come as `cu_seq_lens_q` and `max_length_q`,
keyword arguments that a supported model hands through. A new backend is an entry in `ATTENTION_BACKENDS`, in the order
in which `auto` tries them; each says why it cannot serve a model. A sliding window W counts the current token, as it
does in transformers; flash kernels count only the tokens before it, hence W - 1.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shards.errors import ModelError

IMPLEMENTATION = "packrow"
"""The name under which models find the function; it must hold none of "flash", "sdpa", "flex", "/"."""

BACKEND_KEYWORD = "packrow_backend"
"""Keyword argument of a model's forward that names the backend; without it the device decides."""

_MAX_HEAD_DIM = 256
_QUERY_BLOCK = 256
_HARMLESS = frozenset(
    {
        "sliding_window", "position_ids", "position_embeddings", "cache_position", "use_cache", "is_causal",
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic", "return_dict",
        "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep",
        "num_items_in_batch", BACKEND_KEYWORD,
    }
)  # fmt: skip
_NAMED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on attention scores",
    "indices": "attention to selected tokens only",
    "block_indices": "attention to selected blocks only",
}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model asks of a backend."""

    device: torch.device
    dtype: torch.dtype
    """Of query, key and value as attention computes them (the autocast type where that is on)."""
    head_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head; differs from `head_dim` in latent attention."""


class Attend(Protocol):
    """Causal attention inside each segment."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int | None, scale: float
    ) -> Tensor:
        """Return the attention of every token over its own segment, up to itself; arguments as for `Backend`."""
        ...


@dataclass(frozen=True)
class Backend:
    """A way to compute attention over packed rows.

    Calling it takes `q` (T, H, D), `k` (T, H_kv, D), `v` (T, H_kv, D_v), all of one dtype; `cu_seqlens` int32 (n + 1,),
    last exactly T, repeated offsets allowed; `max_seqlen`, at least the longest segment; `window`, the tokens that a
    query sees, itself counted, None for all; `scale`, a factor on the scores. It returns (T, H, D_v).
    """

    attend: Attend
    can: Callable[[Needs], str | None]
    """None if it can serve these needs, otherwise the reason why not."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int | None, scale: float
    ) -> Tensor:
        """Compute the attention; arguments as the class says."""
        return self.attend(q, k, v, cu_seqlens, max_seqlen, window, scale)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # find_spec imports the parent package, which may be the missing one
        return False


def _cannot_flash(needs: Needs, *, capability: tuple[int, int]) -> str | None:
    if needs.device.type != "cuda":
        return f"runs on CUDA devices only, the model is on {needs.device.type}"
    if (found := torch.cuda.get_device_capability(needs.device)) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}, this GPU has {found[0]}.{found[1]}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16 only, not in {str(needs.dtype).removeprefix('torch.')}"
    if max(needs.head_dim, needs.value_dim) > _MAX_HEAD_DIM:
        return f"takes heads up to {_MAX_HEAD_DIM} wide, these are {max(needs.head_dim, needs.value_dim)}"
    return None


def _pad_heads(*heads: Tensor) -> list[Tensor]:
    """Widen all heads to one multiple of 8 with zeros, which change no score and are cut off the result."""
    width = -(-max(x.shape[-1] for x in heads) // 8) * 8
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in heads]


def _flash_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int | None, scale: float
) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    value_dim = v.shape[-1]
    q, k, v = _pad_heads(q, k, v)
    # Keywords only: the fourth positional argument is `qv` here and `cu_seqlens_q` in flash-attn 2.
    out = flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen,
        softmax_scale=scale, causal=True, window_size=(None, None) if window is None else (window - 1, 0),
    )  # fmt: skip
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)[..., :value_dim]


def _cannot_flash_4(needs: Needs) -> str | None:
    if not _has_module("flash_attn.cute"):
        return "flash-attn-4 is not installed"
    if reason := _cannot_flash(needs, capability=(9, 0)):
        return reason
    width = max(needs.head_dim, needs.value_dim)
    if torch.cuda.get_device_capability(needs.device)[0] > 9 and 128 < width < _MAX_HEAD_DIM:
        return f"takes heads up to 128 or of exactly 256 on this GPU, these are {width}"
    return None


def _flash_2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int | None, scale: float
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    value_dim = v.shape[-1]
    q, k, v = _pad_heads(q, k, v)
    out = flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen,
        dropout_p=0.0, softmax_scale=scale, causal=True, window_size=(-1, -1) if window is None else (window - 1, 0),
    )  # fmt: skip
    return cast(Tensor, out)[..., :value_dim]


def _cannot_flash_2(needs: Needs) -> str | None:
    if not _has_module("flash_attn.flash_attn_interface"):
        return "flash-attn is not installed"
    return _cannot_flash(needs, capability=(8, 0))


@functools.cache
def _torch_varlen() -> tuple[Callable[..., Tensor], frozenset[str]] | None:
    """Torch's function and the names of its parameters, which differ between 2.11 and 2.14; None before 2.11."""
    if not _has_module("torch.nn.attention.varlen"):
        return None
    from torch.nn.attention.varlen import varlen_attn

    names = frozenset(inspect.signature(varlen_attn).parameters)
    return (cast(Callable[..., Tensor], varlen_attn), names) if {"scale", "window_size"} <= names else None


def _torch(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int | None, scale: float
) -> Tensor:
    varlen = _torch_varlen()
    assert varlen is not None
    function, names = varlen
    value_dim, grouped = v.shape[-1], q.shape[1] != k.shape[1]
    q, k, v = _pad_heads(q, k, v)
    # 2.11 takes fewer key heads as they are; later versions want to be told.
    extra = {"enable_gqa": True} if grouped and "enable_gqa" in names else {}
    left = -1 if window is None else window - 1
    out = function(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=(left, 0), **extra)
    return out[..., :value_dim]


def _cannot_torch(needs: Needs) -> str | None:
    if _torch_varlen() is None:
        return f"torch {torch.__version__} has no varlen_attn with a window; 2.11 or newer has"
    return _cannot_flash(needs, capability=(8, 0))


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Attend inside one segment with a window, block by block: memory grows with the window, not with the length."""
    length, block = q.shape[-2], max(window, _QUERY_BLOCK)
    parts = []
    for start in range(0, length, block):
        stop, first = min(start + block, length), max(0, start - window + 1)
        behind = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        parts.append(
            F.scaled_dot_product_attention(
                q[..., start:stop, :],
                k[..., first:stop, :],
                v[..., first:stop, :],
                attn_mask=(behind >= 0) & (behind < window),
                scale=scale,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, dim=-2)


@torch.compiler.disable  # compiled, it would be rebuilt for every new list of lengths
def _segment_loop(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int | None, scale: float
) -> Tensor:
    lengths = cu_seqlens.diff().tolist()
    outputs = []
    # One split, not slices: the backward of n slices would write n gradients of full size.
    for parts in zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True):
        if not len(parts[0]):
            continue
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in parts)
        if window is not None and window < len(parts[0]):
            out = _windowed(query, key, value, window, scale)
        else:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


ATTENTION_BACKENDS: dict[str, Backend] = {
    "flash-attn-4": Backend(_flash_4, _cannot_flash_4),
    "flash-attn": Backend(_flash_2, _cannot_flash_2),
    "torch": Backend(_torch, _cannot_torch),
    # Plain torch, so it serves any device and dtype; on a GPU it costs a host sync per layer.
    "cpu": Backend(_segment_loop, lambda needs: None),
}


def disagreement(backend: Backend, needs: Needs, window: int | None) -> str | None:
    """Hold a backend against the segment loop in fp32, on random heads of the model's widths, forward and backward.

    Returns:
        None if they agree, otherwise what went wrong.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 1, 33, 200, 0, 70])
    cu_seqlens = lengths.cumsum(0).to(needs.device, torch.int32)
    shapes = [(304, 4, needs.head_dim), (304, 2, needs.head_dim), (304, 2, needs.value_dim), (304, 4, needs.value_dim)]
    *heads, upstream = (torch.randn(shape, generator=generator).to(needs.device, needs.dtype) for shape in shapes)
    results = []
    for attend, dtype in ((backend, needs.dtype), (ATTENTION_BACKENDS["cpu"], torch.float32)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in heads]
        q, k, v = leaves
        try:
            out = attend(q, k, v, cu_seqlens, 200, window, needs.head_dim**-0.5)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))])
        except (ImportError, AttributeError, AssertionError, RuntimeError, TypeError, ValueError) as error:
            return f"fails on this machine ({type(error).__name__}: {str(error).strip().splitlines()[:1]})"
    worst = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
    return None if worst < 2e-2 else f"differs from plain attention by {worst:.1e} (window {window})"


def pick_backend(name: str, needs: Needs, *, prove: bool = False) -> tuple[str, list[str]]:
    """Choose the backend for a model.

    Args:
        name: A key of `ATTENTION_BACKENDS`, which forces it, or `auto` for the first that can.
        needs: What the model asks for.
        prove: Also hold each candidate against the segment loop (seconds, where a kernel is compiled).

    Returns:
        The chosen key, and one readable line for each backend passed over and for the choice.

    Raises:
        ModelError: The forced backend is unknown or cannot serve these needs.
    """
    if name != "auto" and name not in ATTENTION_BACKENDS:
        raise ModelError(f"--attention {name}: no such backend. Use one of: auto, {', '.join(ATTENTION_BACKENDS)}")
    lines: list[str] = []
    for key, backend in ATTENTION_BACKENDS.items():
        if name not in ("auto", key):
            continue
        reason = backend.can(needs)
        if reason is None and prove and key != "cpu":
            reason = disagreement(backend, needs, None) or disagreement(backend, needs, 50)
        if reason is None:
            slow = ", one host sync per layer" if key == "cpu" and needs.device.type == "cuda" else ""
            return key, [*lines, f"attention {key}: {'chosen' if name == 'auto' else 'asked for'}{slow}"]
        lines.append(f"attention {key}: passed over, {reason}")
    raise ModelError(f"--attention {lines[0].removeprefix('attention ')}. Use --attention auto, or another backend")


def _compute_dtype(value: Tensor) -> torch.dtype:
    """The type in which attention runs: rotary embeddings and query norms return fp32 under autocast."""
    device = value.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype


def needs_of(query: Tensor, value: Tensor) -> Needs:
    """Return the needs of heads shaped (..., D)."""
    return Needs(device=query.device, dtype=_compute_dtype(value), head_dim=query.shape[-1], value_dim=value.shape[-1])


@functools.cache
def _default_backend(needs: Needs) -> str:
    return pick_backend("auto", needs)[0]


def _refuse_unless_plain(module: nn.Module, query: Tensor, key: Tensor, mask: Any, dropout: float, extra: Any) -> None:
    """Raise where a model asks for anything that the kernels would silently leave out."""
    where = type(module).__name__
    if mask is not None:
        raise ModelError(f"{where}: got an attention mask; packed rows carry cu_seq_lens_q instead. Pass no mask")
    if extra.get("cu_seq_lens_q") is None or extra.get("max_length_q") is None:
        raise ModelError(
            f"{where}: cu_seq_lens_q and max_length_q did not arrive; the model must hand keyword arguments through to "
            "its attention layers. Use another model, or a bucketed dataset"
        )
    if query.shape[0] != 1:
        raise ModelError(f"{where}: a batch of {query.shape[0]}; packed rows lie end to end in one row. Flatten them")
    if query.shape[-2] != key.shape[-2]:
        raise ModelError(
            f"{where}: {query.shape[-2]} queries but {key.shape[-2]} keys; training has no cache. Pass use_cache=False"
        )
    if dropout > 0:
        raise ModelError(f"{where}: attention dropout is {dropout}; the kernels have none. Set it to 0 in the config")
    causal = extra.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelError(f"{where}: attention is not causal; packed rows train causal language models only")
    for name, value in extra.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise ModelError(
                f"{where}: needs {_NAMED.get(name, f'the attention argument {name!r}')}, which packed attention leaves "
                "out. Use another model, or a bucketed dataset"
            )


def packrow(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend inside each segment; the function that transformers' models call.

    Args:
        module: The attention layer that calls.
        query: (1, H, T, D); `key` and `value` are (1, H_kv, T, D) and (1, H_kv, T, D_v).
        attention_mask: Must be None.
        scaling: Factor on the scores; 1/sqrt(D) if None.
        dropout: Must be 0.
        **kwargs: `cu_seq_lens_q` int32 (n + 1,), `max_length_q` int, `sliding_window` int or None, and what models add.

    Returns:
        (1, T, H, D_v), and None for the weights.

    Raises:
        ModelError: The model asks for something that packed attention would leave out.
    """
    _refuse_unless_plain(module, query, key, attention_mask, dropout, kwargs)
    dtype = _compute_dtype(value)
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    name = kwargs.get(BACKEND_KEYWORD) or _default_backend(needs_of(query, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    window = kwargs.get("sliding_window") or -1
    out = ATTENTION_BACKENDS[name](
        q, k, v, kwargs["cu_seq_lens_q"], kwargs["max_length_q"], window if window > 0 else None, scale
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Make `packrow` known to transformers; without a mask function, so that no mask is ever built."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packrow)
