"""One attention function for packed rows, `packrow`, which transformers' models call in every attention layer.

How it is called: `packrow(module, query, key, value, None, scaling=…, cu_seq_lens_q=…, max_length_q=…)`; see there. It
refuses what the kernels would silently leave out, and hands the rest to a backend (`backends/registry.py`: how to add
one). Registered with transformers' `AttentionInterface` and with no mask function, so that transformers builds no mask
at all (0 host syncs per forward; its own packed paths cost 1 to 9). The boundaries are keyword arguments that a
supported model passes through to its layers.
"""

import functools
import itertools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from shards.errors import ModelError
from trainer.model.backends.choice import pick_backend
from trainer.model.backends.interface import Backends, Needs, compute_dtype, needs_of
from trainer.model.backends.registry import ATTENTION_BACKENDS

IMPLEMENTATION = "packrow"
"""The name under which models find the function; it must hold none of "flash", "sdpa", "flex", "/"."""

BACKEND_KEYWORD = "packrow_backend"
"""Keyword argument of a model's forward that names the backend; without it the device decides."""

_PASSED_ON = frozenset({"sliding_window", "softcap", "s_aux"})
_HARMLESS = frozenset(
    {
        "position_ids", "position_embeddings", "cache_position", "use_cache", "is_causal",
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "deterministic", "return_dict",
        "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep",
        "num_items_in_batch", BACKEND_KEYWORD,
    }
)  # fmt: skip
_NAMED = {
    "sinks": "attention sinks under another name than s_aux",
    "position_bias": "a bias on attention scores",
    "indices": "attention to selected tokens only",
    "block_indices": "attention to selected blocks only",
}


def _refuse_unless_plain(module: nn.Module, query: Tensor, key: Tensor, mask: Any, dropout: float, extra: Any) -> None:
    """Raise where a model asks for anything that the kernels would silently leave out."""
    where = type(module).__name__
    if mask is not None:
        raise ModelError(f"{where}: got an attention mask; expected none, since cu_seq_lens_q has the boundaries.")
    if extra.get("cu_seq_lens_q") is None or extra.get("max_length_q") is None:
        raise ModelError(
            f"{where}: cu_seq_lens_q and max_length_q did not arrive; expected the model to pass keyword arguments "
            "through to its attention layers. Use another model, or a bucketed dataset."
        )
    if query.shape[0] != 1:
        raise ModelError(f"{where}: a batch of {query.shape[0]}; expected one row, documents end to end. Flatten them.")
    if query.shape[-2] != key.shape[-2]:
        raise ModelError(
            f"{where}: {query.shape[-2]} queries, {key.shape[-2]} keys; expected as many of both. Pass use_cache=False."
        )
    if dropout > 0:
        raise ModelError(f"{where}: attention dropout is {dropout}; expected 0. Set it to 0 in the configuration.")
    causal = extra.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelError(f"{where}: attention is not causal; expected a causal language model.")
    for name, value in extra.items():
        if name not in _HARMLESS | _PASSED_ON and value is not None and value is not False:
            raise ModelError(
                f"{where}: needs {_NAMED.get(name, f'the attention argument {name!r}')}, which packed attention would "
                "leave out; expected plain, windowed, soft-capped attention or sinks. Use a bucketed dataset."
            )


@functools.cache
def _default_backend(needs: Needs) -> str:
    """Choose a backend outside `pack train`, where nothing has proved one, and say so once."""
    name, _ = pick_backend("auto", needs)
    if needs.device.type == "cuda":
        warnings.warn(
            f"attention {name}: chosen without a check against plain attention, heads of {needs.head_dim} in "
            f"{str(needs.dtype).removeprefix('torch.')}; expected {BACKEND_KEYWORD} from load_model."
            + (" The segment loop is slow; train in bf16 for a kernel." if name == "cpu" else ""),
            stacklevel=3,
        )
    return name


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
        **kwargs: `cu_seq_lens_q` int32 (n + 1,), `max_length_q` int, `sliding_window` int or None, `softcap` float or
            None, `s_aux` (H,) or None (sinks), and what models add.

    Returns:
        (1, T, H, D_v), and None for the weights.

    Raises:
        ModelError: The model asks for something that packed attention would leave out.
    """
    _refuse_unless_plain(module, query, key, attention_mask, dropout, kwargs)
    dtype = compute_dtype(value)
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    chosen: Backends = kwargs.get(BACKEND_KEYWORD) or _default_backend(needs_of(query, key, value, kwargs))
    backend = ATTENTION_BACKENDS[chosen if isinstance(chosen, str) else chosen[q.shape[-1], v.shape[-1]]]
    window = kwargs.get("sliding_window") or 0
    cu_seqlens, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    if (chunk := chunk_of(module)) is not None and chunk < longest:
        cu_seqlens, longest = _chunked(cu_seqlens, chunk), chunk
    out = backend(
        q, k, v, cu_seqlens, longest, window if window > 0 else None,
        q.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap") or None, kwargs.get("s_aux"),
    )  # fmt: skip
    return out.unsqueeze(0), None


_chunks: dict[int, tuple[Tensor, Tensor]] = {}


@torch.compiler.disable
def _chunked(cu_seqlens: Tensor, chunk: int) -> Tensor:
    """Return `chunk_offsets`, once for all layers of a forward: a host sync on a GPU."""
    known = _chunks.get(chunk)
    if known is None or known[0] is not cu_seqlens:
        known = _chunks[chunk] = cu_seqlens, chunk_offsets(cu_seqlens, chunk)
    return known[1]


def chunk_of(module: nn.Module) -> int | None:
    """Return the tokens of a chunk where a layer attends inside fixed chunks of a document, else None."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is None or not isinstance(index, int) or index >= len(types) or types[index] != "chunked_attention":
        return None
    size = getattr(config, "attention_chunk_size", None)
    return size if isinstance(size, int) else None


def chunk_offsets(cu_seqlens: Tensor, chunk: int) -> Tensor:
    """Return the boundaries of chunks inside segments: attention in them is attention in shorter segments.

    Example: segments of 3 and 5 tokens in chunks of 2 have the boundaries 0, 2, 3, 5, 7, 8.

    Args:
        cu_seqlens: int32 (n + 1,), first 0; repeated offsets stay. Read on the host.
    """
    offsets = cu_seqlens.tolist()
    cut = [0]
    for begin, end in itertools.pairwise(offsets):
        cut += [*range(begin + chunk, end, chunk), end]
    return torch.tensor(cut, dtype=torch.int32).to(cu_seqlens.device, non_blocking=True)


def segment_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the number of each token's segment, int32 (1, tokens), made on the device without a sync."""
    places = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], places, right=True).to(torch.int32)[None]


def register() -> None:
    """Make `packrow` known to transformers; without a mask function, so that no mask is ever built."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packrow)
