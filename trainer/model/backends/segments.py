"""The segment loop: plain torch, one segment after another, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

_QUERY_BLOCK = 256


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
def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sliding_window: int | None,  # noqa: ARG001
    scale: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend segment by segment; arguments as for `Backend`."""
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
