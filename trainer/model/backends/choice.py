"""Which backend a model's layers take: the first that can serve them and is proven to agree with plain attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shards.errors import ModelError
from trainer.model.backends.foreign import describe_failure, failure_of
from trainer.model.backends.interface import Backend, Backends, Needs
from trainer.model.backends.registry import ATTENTION_BACKENDS

SYNCS = {"cpu": ", one host sync per layer", "flex": ", one host sync per micro-batch"}
"""What the backends that read boundaries on the host cost on a GPU."""


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


def rivals(first: str, needs: Sequence[Needs]) -> list[str]:
    """Return the backends that may be faster than the first that can serve: proven, and without a host sync.

    Args:
        first: What `pick_backend` chose; it is the first of them, and the only one if it needs host syncs itself.
        needs: Heads of one width, as the layers have them.
    """
    names = list(ATTENTION_BACKENDS)
    later = [] if first in SYNCS else [key for key in names[names.index(first) + 1 :] if key not in SYNCS]
    return [first, *(key for key in later if _reason(ATTENTION_BACKENDS[key], needs, prove=True) is None)]


def _reason(backend: Backend, needs: Sequence[Needs], *, prove: bool) -> str | None:
    """Return the first reason why a backend cannot serve, or is not right where that is to be proven."""
    reasons = (backend.unsupported_reason(each) for each in needs)
    if (reason := next((each for each in reasons if each is not None), None)) is not None or not prove:
        return reason
    return next((found for each in needs if (found := disagreement(backend, each)) is not None), None)


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
        reason = _reason(backend, needs, prove=prove and key != "cpu")
        if reason is None:
            slow = SYNCS.get(key, "") if needs[0].device.type == "cuda" else ""
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
