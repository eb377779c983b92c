"""FlexAttention over packed rows: its block mask comes from `cu_seqlens` by interval arithmetic on the host.

A query sees one interval of keys: from its segment's start, or its window's, to itself. Both ends only rise from query
to query, so the key blocks that a block of queries touches are an interval too, and so are those that it sees whole:
no score is looked at, where torch's `create_block_mask` evaluates the mask at every pair of tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trainer.model.backends.foreign import import_reason
from trainer.model.backends.interface import Needs

BLOCK = 128
"Queries, and keys, of a block."


def plan_blocks(
    cu_seqlens: np.ndarray, sliding_window: int | None = None, block: int = BLOCK
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Say which blocks of keys each block of queries touches, and which of them it sees whole.

    Example: segments of 3 and 3 tokens in blocks of 2: queries 2 and 3 touch keys 0 to 3 (query 2 sees 0 to 2, query 3
    only itself), so blocks 0 and 1; none whole.

    Args:
        cu_seqlens: int32 (n + 1,), last T; repeated offsets allowed.
        sliding_window: Tokens that a query sees, itself counted.

    Returns:
        `first`, `whole`, `last`: int64 (blocks,). Block i touches key blocks first[i] to i; it sees whole[i] to
        last[i] - 1 whole, none of them where whole[i] >= last[i].
    """
    total = int(cu_seqlens[-1])
    queries = np.arange(0, total, block)
    ends = np.minimum(queries + block, total) - 1

    def first_key(query: np.ndarray) -> np.ndarray:
        start = cu_seqlens[np.searchsorted(cu_seqlens, query, side="right") - 1].astype(np.int64)
        return start if sliding_window is None else np.maximum(start, query - sliding_window + 1)

    return first_key(queries) // block, -(-first_key(ends) // block), np.arange(len(queries))


def block_mask(cu_seqlens: Tensor, sliding_window: int | None) -> Any:
    """Return the `BlockMask` of packed rows; reads the boundaries back from a GPU."""
    from torch.nn.attention.flex_attention import BlockMask

    boundaries = cu_seqlens.cpu().numpy()
    first, whole, last = plan_blocks(boundaries, sliding_window)
    key = np.arange(len(last))
    full = (key >= whole[:, None]) & (key < last[:, None])
    partial = (key >= first[:, None]) & (key <= last[:, None]) & ~full
    total = int(boundaries[-1])
    places = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        seen = (document[query] == document[key]) & (key <= query)
        return seen if sliding_window is None else seen & (query - key < sliding_window)

    some, which = _table(partial, cu_seqlens.device)
    wholes, which_whole = _table(full, cu_seqlens.device)
    return BlockMask.from_kv_blocks(
        some, which, wholes, which_whole, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(total, total)
    )


def _table(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each row has, int32 (1, 1, n), and which, those first, int32 (1, 1, n, n)."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(1, dtype=np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


_last: dict[int | None, tuple[Tensor, Any]] = {}


def _mask_once(cu_seqlens: Tensor, sliding_window: int | None) -> Any:
    """Return the block mask, made once for all layers of a forward."""
    known = _last.get(sliding_window)
    if known is None or known[0] is not cu_seqlens:
        known = _last[sliding_window] = cu_seqlens, block_mask(cu_seqlens, sliding_window)
    return known[1]


@torch.compiler.disable  # compiled by itself, so that a layer around it needs no mask in its graph
def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,  # noqa: ARG001
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend by FlexAttention; arguments as for `Backend`."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap) if softcap else score

    function = _compiled() if q.is_cuda else cast(Callable[..., Any], flex_attention)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, aux = function(
        query, key, value, score_mod=capped if softcap else None, block_mask=_mask_once(cu_seqlens, sliding_window),
        scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is not None:  # a sink takes weight exp(sink) out of exp(lse) + exp(sink)
        out = out * torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])[..., None].to(out.dtype)
    return cast(Tensor, out.squeeze(0).transpose(0, 1))


def unsupported_reason(needs: Needs) -> str | None:
    """Return why the kernel cannot serve these needs, None where it can."""
    if needs.device.type != "cuda":
        return f"has no backward on {needs.device.type}"
    return import_reason("triton", "triton") or import_reason("torch.nn.attention.flex_attention", "torch")
