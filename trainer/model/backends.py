"""The kernels that can attend over packed rows: `ATTENTION_BACKENDS`, in the order in which `auto` tries them.

How one is called: `backend(q, k, v, cu_seqlens, max_seqlen, sliding_window, scale, softcap, sinks)`, see `Backend`.
How one is added: write a function of that form and one that says why it cannot serve some `Needs`; put both into
`ATTENTION_BACKENDS`. The property test compares it with the definition, `disagreement` with the segment loop before
a run. A sliding window W counts the current token, as in transformers; flash kernels count only the tokens before it.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shards.errors import ModelError, reason_of
from trainer.model import flex

_MAX_HEAD_DIM = 256
_QUERY_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one kind of attention layer asks of a backend."""

    device: torch.device
    dtype: torch.dtype
    """Of query, key and value as attention computes them (the autocast type where that is on)."""
    head_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head; differs from `head_dim` in latent attention."""
    num_heads: int = 4
    num_kv_heads: int = 2
    sliding_window: int | None = None
    """Tokens that a query sees, itself counted; None for all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: bool = False
    """Whether each head has a learned score that takes weight and gives no value."""

    @property
    def heads(self) -> tuple[int, int]:
        """Widths of query and value heads, which name the kind of layer at run time."""
        return self.head_dim, self.value_dim


Backends = str | Mapping[tuple[int, int], str]
"""The backend of a model, or one for each kind of layer, by the widths of its query and value heads."""


class Attend(Protocol):
    """Causal attention inside each segment; arguments as for `Backend`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
        scale: float, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return (T, H, D_v)."""
        ...


@dataclass(frozen=True)
class Backend:
    """A way to compute attention over packed rows.

    Calling it takes `q` (T, H, D), `k` (T, H_kv, D), `v` (T, H_kv, D_v), all of one dtype; `cu_seqlens` int32 (n + 1,),
    last exactly T, repeated offsets allowed; `max_seqlen`, at least the longest segment; `sliding_window`, the tokens
    that a query sees, itself counted, None for all; `scale`, a factor on the scores; `softcap` and `sinks` (H,), None
    where there are none. It returns (T, H, D_v).
    """

    attend: Attend
    unsupported_reason: Callable[[Needs], str | None]
    """None if it can serve these needs, otherwise the reason why not."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
        scale: float, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend; see the class."""
        return self.attend(q, k, v, cu_seqlens, max_seqlen, sliding_window, scale, softcap, sinks)


def failure_of(work: Callable[[], object]) -> BaseException | None:
    """Run foreign code and return what it raised, if anything.

    Kernels and their compilers raise classes of their own, and packages built for another torch raise whatever their
    first line trips over: no list of classes would be complete. Nothing of this project's may run in here but the call.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).exception()


def describe_failure(error: BaseException) -> str:
    """Return an exception's class and the first line of what it says."""
    return f"{type(error).__name__}: {reason_of(error)}"


@functools.cache
def import_reason(module: str, package: str) -> str | None:
    """Return why a module cannot be used: its package is not installed, or is and cannot be imported."""
    error = failure_of(lambda: importlib.import_module(module))
    if error is None:
        return None
    parts = module.split(".")
    parents = {".".join(parts[: i + 1]) for i in range(len(parts))}
    if isinstance(error, ModuleNotFoundError) and error.name in parents:
        return f"{package} is not installed"
    return f"{package} is installed, but cannot be imported ({describe_failure(error)})"


def _flash_reason(needs: Needs, *, capability: tuple[int, int]) -> str | None:
    if needs.device.type != "cuda":
        return f"runs on CUDA devices only, the model is on {needs.device.type}"
    if (found := torch.cuda.get_device_capability(needs.device)) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}, this GPU has {found[0]}.{found[1]}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16 only, not in {str(needs.dtype).removeprefix('torch.')}"
    if max(needs.heads) > _MAX_HEAD_DIM:
        return f"takes heads up to {_MAX_HEAD_DIM} wide, these are {max(needs.heads)}"
    return None


def _pad_heads(*heads: Tensor) -> list[Tensor]:
    """Widen all heads to one multiple of 8 with zeros, which change no score and are cut off the result."""
    width = -(-max(x.shape[-1] for x in heads) // 8) * 8
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in heads]


@torch.compiler.disable  # traced, it would break the graph inside CuTe's own compiler, five times a layer
def _flash_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from flash_attn.cute import flash_attn_varlen_func

    value_dim = v.shape[-1]
    q, k, v = _pad_heads(q, k, v)
    # Keywords only: the fourth positional argument is `qv` here and `cu_seqlens_q` in flash-attn 2.
    out = flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, softmax_scale=scale, causal=True,
        window_size=(None, None) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0, learnable_sink=None if sinks is None else sinks.to(q.dtype),
    )  # fmt: skip
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)[..., :value_dim]


def _flash_4_reason(needs: Needs) -> str | None:
    if reason := _flash_reason(needs, capability=(9, 0)) or import_reason("flash_attn.cute", "flash-attn-4"):
        return reason
    width = max(needs.heads)
    if torch.cuda.get_device_capability(needs.device)[0] > 9 and 128 < width < _MAX_HEAD_DIM:
        return f"takes heads up to 128 or of exactly 256 on this GPU, these are {width}"
    return None


def _flash_2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    from flash_attn import flash_attn_varlen_func

    value_dim = v.shape[-1]
    q, k, v = _pad_heads(q, k, v)
    out = flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, dropout_p=0.0, softmax_scale=scale, causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0), softcap=softcap or 0.0,
    )  # fmt: skip
    return cast(Tensor, out)[..., :value_dim]


def _flash_2_reason(needs: Needs) -> str | None:
    if needs.sinks:
        return "has no attention sinks"
    return _flash_reason(needs, capability=(8, 0)) or import_reason("flash_attn.flash_attn_interface", "flash-attn")


def _find_torch_varlen() -> tuple[Callable[..., Tensor], frozenset[str]] | None:
    """Return torch's function and its parameters' names, which differ between 2.11 and 2.14; None before 2.11."""
    if import_reason("torch.nn.attention.varlen", "torch") is not None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    names = frozenset(inspect.signature(varlen_attn).parameters)
    return (cast(Callable[..., Tensor], varlen_attn), names) if {"scale", "window_size"} <= names else None


_TORCH_VARLEN = _find_torch_varlen()  # now, not when asked: a compiler would trace the search into every layer


def _torch(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    assert _TORCH_VARLEN is not None
    function, names = _TORCH_VARLEN
    value_dim, grouped = v.shape[-1], q.shape[1] != k.shape[1]
    q, k, v = _pad_heads(q, k, v)
    # 2.11 takes fewer key heads as they are; later versions want to be told.
    extra = {"enable_gqa": True} if grouped and "enable_gqa" in names else {}
    left = -1 if sliding_window is None else sliding_window - 1
    out = function(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=(left, 0), **extra)
    return out[..., :value_dim]


def _torch_reason(needs: Needs) -> str | None:
    if _TORCH_VARLEN is None:
        return f"torch {torch.__version__} has no varlen_attn with a window; 2.11 or newer has"
    if needs.sinks or needs.softcap:
        return f"has no {'attention sinks' if needs.sinks else 'soft-cap'}"
    return _flash_reason(needs, capability=(8, 0))


def _flex_reason(needs: Needs) -> str | None:
    if needs.device.type != "cuda":
        return f"has no backward on {needs.device.type}"
    return import_reason("triton", "triton") or import_reason("torch.nn.attention.flex_attention", "torch")


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend by the definition, for scores that SDPA does not know; shapes as there, `allowed` bool (queries, keys)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=dtype).to(v.dtype)
    return weights[..., : k.shape[-2]] @ v


def _by_blocks(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend inside one segment, block by block of queries: memory grows with the window, not with the length squared.

    Example: window 3, queries 4 to 7 of a block need keys 2 to 7; query 4 sees 2, 3, 4.
    """
    length, block = q.shape[-2], max(min(window, q.shape[-2]), _QUERY_BLOCK)
    parts = []
    for start in range(0, length, block):
        stop, first = min(start + block, length), max(0, start - window + 1)
        query, key, value = q[..., start:stop, :], k[..., first:stop, :], v[..., first:stop, :]
        behind = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        allowed = (behind >= 0) & (behind < window)
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale, enable_gqa=True)
        else:
            out = _explicit(query, key, value, allowed, scale, softcap, sinks)
        parts.append(out)
    return torch.cat(parts, dim=-2)


@torch.compiler.disable  # compiled, it would be rebuilt for every new list of lengths
def _segment_loop(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,  # noqa: ARG001
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    lengths = cu_seqlens.diff().tolist()
    plain = softcap is None and sinks is None
    outputs = []
    # One split, not slices: the backward of n slices would write n gradients of full size.
    for parts in zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True):
        length = len(parts[0])
        if not length:
            continue
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in parts)
        if plain and (sliding_window is None or sliding_window >= length):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        else:
            out = _by_blocks(query, key, value, sliding_window or length, scale, softcap, sinks)
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


ATTENTION_BACKENDS: dict[str, Backend] = {
    "flash-attn-4": Backend(_flash_4, _flash_4_reason),
    "flash-attn": Backend(_flash_2, _flash_2_reason),
    "torch": Backend(_torch, _torch_reason),
    "flex": Backend(flex.attend, _flex_reason),
    # Plain torch, so it serves any device, dtype and kind of score; on a GPU it costs a host sync per layer.
    "cpu": Backend(_segment_loop, lambda needs: None),
}


def disagreement(backend: Backend, needs: Needs) -> str | None:
    """Compare a backend with the segment loop in fp32 on random heads as the model has them, forward and backward.

    Returns:
        None if they agree, otherwise what went wrong.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 1, 33, 200, 0, 70, 0, 0])  # the last ones are empty, as padded offsets are
    cu_seqlens = lengths.cumsum(0).to(needs.device, torch.int32)
    window = None if needs.sliding_window is None else min(needs.sliding_window, 50)  # one that bites
    heads, kv_heads = needs.num_heads, needs.num_kv_heads
    shapes: list[tuple[int, ...]] = [(304, heads, needs.head_dim), (304, kv_heads, needs.head_dim)]
    shapes += [(304, kv_heads, needs.value_dim), *([(heads,)] if needs.sinks else [])]
    *inputs, upstream = (
        torch.randn(shape, generator=generator).to(needs.device, needs.dtype)
        for shape in (*shapes, (304, heads, needs.value_dim))
    )
    results: list[list[Tensor]] = []

    def compute(attend: Backend, dtype: torch.dtype) -> None:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        q, k, v, *rest = leaves
        sinks = rest[0] if rest else None
        out = attend(q, k, v, cu_seqlens, 200, window, needs.head_dim**-0.5, needs.softcap, sinks)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))])

    compute(ATTENTION_BACKENDS["cpu"], torch.float32)
    if (error := failure_of(lambda: compute(backend, needs.dtype))) is not None:
        return f"fails on this machine ({describe_failure(error)})"
    expected, found = results
    errors = torch.stack([(a.float() - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)])
    if bool((errors < 2e-2).all()):  # false for NaN too
        return None
    worst = float("nan") if bool(errors.isnan().any()) else float(errors.max())
    return f"differs from plain attention by {worst:.1e} (window {window}, heads {heads}:{kv_heads})"


def pick_backend(name: str, *needs: Needs, prove: bool = False) -> tuple[str, list[str]]:
    """Choose the first backend that serves all of these needs.

    Args:
        name: A key of `ATTENTION_BACKENDS`, which forces it, or `auto` for the first that can.
        needs: What the layers ask for.
        prove: Also compare each candidate with the segment loop (seconds, where a kernel is compiled).

    Returns:
        The chosen key, and one readable line for each backend passed over and for the choice.

    Raises:
        ModelError: The forced backend is unknown or cannot serve these needs.
    """
    if name != "auto" and name not in ATTENTION_BACKENDS:
        raise ModelError(f"`attention`: {name!r}; expected one of auto, {', '.join(ATTENTION_BACKENDS)}.")
    lines: list[str] = []
    for key, backend in ATTENTION_BACKENDS.items():
        if name not in ("auto", key):
            continue
        reasons = [backend.unsupported_reason(each) for each in needs]
        if prove and key != "cpu" and not any(reasons):
            reasons = [disagreement(backend, each) for each in needs]
        reason = next((each for each in reasons if each is not None), None)
        if reason is None:
            syncs = {"cpu": ", one host sync per layer", "flex": ", one host sync per micro-batch"}
            slow = syncs.get(key, "") if needs[0].device.type == "cuda" else ""
            return key, [*lines, f"attention {key}: {'chosen' if name == 'auto' else 'asked for'}{slow}"]
        lines.append(f"attention {key}: passed over, {reason}")
    refused = lines[0].partition(": ")[2]
    raise ModelError(
        f'`attention="{name}"`: {refused}; expected a backend that serves the model. '
        'Use `attention="auto"`, or another backend.'
    )


def pick_backends(name: str, needs: Sequence[Needs], *, prove: bool = False) -> tuple[Backends, list[str]]:
    """Choose a backend for each kind of layer; one for the whole model where all heads have the same widths.

    Raises:
        ModelError: As `pick_backend`.
    """
    if not needs:
        return {}, ["attention: no layer calls packed attention"]
    kinds = {each.heads: [other for other in needs if other.heads == each.heads] for each in needs}
    chosen = {heads: pick_backend(name, *same, prove=prove) for heads, same in kinds.items()}
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    lines = [f"heads of {heads[0]}: {line}" for heads, (_, said) in chosen.items() for line in said]
    return {heads: key for heads, (key, _) in chosen.items()}, lines


def compute_dtype(value: Tensor) -> torch.dtype:
    """Return the type in which attention runs: rotary embeddings and query norms return fp32 under autocast."""
    device = value.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype


def needs_of(query: Tensor, key: Tensor, value: Tensor, extra: dict[str, Any]) -> Needs:
    """Return the needs of heads shaped (1, H, T, D), called with these keyword arguments."""
    window = extra.get("sliding_window") or 0
    return Needs(
        device=query.device,
        dtype=compute_dtype(value),
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        sliding_window=window if window > 0 else None,
        softcap=extra.get("softcap") or None,
        sinks=extra.get("s_aux") is not None,
    )
