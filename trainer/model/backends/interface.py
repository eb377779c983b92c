"""What attention layers need, and the form in which a backend serves it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


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
