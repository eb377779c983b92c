"""Summed cross-entropy of packed rows, without ever holding all logits: `PackedLM`, the module that a training loop calls.

The body runs once over the row; the head and the loss run in chunks of rows, at most 64 Mi logits at a time (a row of 32k
tokens and 128k words would hold 16 GiB of fp32 logits, and as much again for their gradient). A plain linear head takes
`_LinearCrossEntropy`, which makes the gradients while the logits are there (3 matrix products instead of 4), or liger's
fused kernel; any other head (LoRA on it, scaled or soft-capped logits) is called chunk by chunk and recomputed in
backward. The sum is divided by a number that the caller knows for the whole step, so no split of a step changes the loss.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shards.errors import ModelError
from trainer.attention import BACKEND_KEYWORD

IGNORED = -100
_CHUNK_LOGITS = 1 << 26


def _chunk_rows(vocab_size: int) -> int:
    return max(128, _CHUNK_LOGITS // vocab_size)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of weighted token losses of a linear head, with the gradients made chunk by chunk in forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None, z: float,
        with_grads: bool,
    ) -> Tensor:  # fmt: skip
        """See `linear_cross_entropy`; `hidden`, `weight` and `bias` come in the type of the matrix products."""
        wants = [with_grads and wanted for wanted in ctx.needs_input_grad[:3]]
        total = hidden.new_zeros((), dtype=torch.float32)
        grads: list[Tensor | None] = [
            torch.empty_like(hidden) if wants[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if wants[2] and bias is not None else None,
        ]
        rows = _chunk_rows(weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            logits = F.linear(hidden[chunk], weight, bias).float()
            loss, grad = _losses_and_logit_grads(logits, labels[chunk], weights[chunk] if weights is not None else None, z)
            total += loss
            if not any(wants):
                continue
            narrow = grad.to(hidden.dtype)
            if grads[0] is not None:
                grads[0][chunk] = narrow @ weight
            if grads[1] is not None:
                _add_product(grads[1], narrow.t(), hidden[chunk])
            if grads[2] is not None:
                grads[2] += grad.sum(0)
        dtypes = [hidden.dtype, weight.dtype, bias.dtype if bias is not None else None]
        ctx.save_for_backward(*(g.to(d) if g is not None else None for g, d in zip(grads, dtypes, strict=True)))
        return total

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the stored gradients: the loss is a scalar, so that is all that is left to do."""
        return (*(g * grad.to(g.dtype) if g is not None else None for g in ctx.saved_tensors), None, None, None, None)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:  # sums of bf16 products stay in fp32: dozens of chunks would lose the small ones
        total += left @ right


def _losses_and_logit_grads(logits: Tensor, labels: Tensor, weights: Tensor | None, z: float) -> tuple[Tensor, Tensor]:
    """Return the chunk's weighted sum and its gradient by the logits, which is written over them."""
    valid = labels != IGNORED
    scale = valid.float() if weights is None else weights * valid
    target = labels.clamp(min=0).unsqueeze(1)
    lse = torch.logsumexp(logits, dim=1)
    losses = lse - logits.gather(1, target).squeeze(1)
    grad = logits.sub_(lse.unsqueeze(1)).exp_()
    if z:
        losses = losses + z * lse.square()
        grad *= (1 + 2 * z * lse).unsqueeze(1)
    grad.scatter_add_(1, target, torch.full_like(lse, -1.0).unsqueeze(1))
    return torch.dot(losses, scale), grad.mul_(scale.unsqueeze(1))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None = None, z_loss: float = 0.0
) -> Tensor:
    """Sum token losses of a linear head without holding all logits.

    Args:
        hidden: (T, D), floating.
        weight: (V, D); `bias` (V,) or None.
        labels: int64 (T,), -100 where there is no target.
        weights: float32 (T,), factor on each token's loss; None for 1.
        z_loss: Factor on the squared log of the softmax's denominator.

    Returns:
        float32 scalar; 0 with gradients of 0 where no token is a target.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None
    with torch.autocast(device, enabled=False):
        # Grad mode is always off inside the function, so it has to be told.
        with_grads = torch.is_grad_enabled()
        return cast(Tensor, _LinearCrossEntropy.apply(hidden, weight, bias, labels, weights, z_loss, with_grads))


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None, z_loss: float = 0.0) -> Tensor:
    """Sum token losses of logits (T, V) in fp32; arguments and result as for `linear_cross_entropy`."""
    logits = logits.float()
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    if z_loss:
        losses = losses + z_loss * torch.logsumexp(logits, dim=1).square() * (labels != IGNORED)
    return losses.sum() if weights is None else torch.dot(losses, weights)


def chunked_cross_entropy(
    logits_of: Callable[[Tensor], Tensor], inputs: Tensor, vocab_size: int, labels: Tensor, weights: Tensor | None, z: float
) -> Tensor:
    """Sum token losses of any head, chunk by chunk, recomputed in backward.

    Args:
        logits_of: Maps a chunk of `inputs` to its logits.
        inputs: (T, ...), split along the first axis.
        vocab_size: Width of the logits; sets the chunk.
        labels: int64 (T,); `weights` float32 (T,) or None; `z` as `z_loss` of `linear_cross_entropy`.
    """

    def chunk_loss(chunk: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        return cross_entropy(logits_of(chunk), labels, weights, z)

    rows = _chunk_rows(vocab_size)
    parts = weights.split(rows) if weights is not None else [None] * -(-len(labels) // rows)
    losses = [
        cast(Tensor, checkpoint(chunk_loss, *args, use_reentrant=False))
        for args in zip(inputs.split(rows), labels.split(rows), parts, strict=True)
    ]
    return torch.stack(losses).sum()


def document_weights(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return 1 / (targets of the token's segment) for every token.

    Args:
        labels: int64 (T,), -100 where there is no target.
        cu_seqlens: int32 (n + 1,), last exactly T.

    Returns:
        float32 (T,); the targets of each segment that has any sum to 1. Computed on the device, without a sync.
    """
    tokens = torch.arange(len(labels), device=labels.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    counts = torch.zeros(len(cu_seqlens) - 1, dtype=torch.float32, device=labels.device)
    counts = counts.index_add(0, segment, (labels != IGNORED).float())
    return counts.clamp(min=1).reciprocal()[segment]


def unwrap(model: nn.Module) -> Any:
    """Return the causal language model inside a peft wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class PackedLM(nn.Module):
    """A causal language model whose forward is the loss of one micro-batch; wrap this in DDP or FSDP2.

    Args:
        model: From `load_model`, wrapped by peft or not.
        backend: Key of `ATTENTION_BACKENDS`; None for a model on its native attention, which takes rectangles only.
        weighting: `token`: every target counts 1. `document`: the targets of each segment count 1 together.
        z_loss: Factor on the squared log of the softmax's denominator; left out in `eval()` mode.
        liger: `auto` or `on` for liger's fused loss where the head allows, `off` for ours.
        plain_head: Whether logits are exactly `lm_head(hidden)`; as the model's report says.
    """

    def __init__(
        self, model: nn.Module, *, backend: str | None, weighting: str = "token", z_loss: float = 0.0, liger: str = "auto",
        plain_head: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.backend = backend
        self.weighting = weighting
        self.z_loss = z_loss
        self.plain_head = plain_head
        self.liger = liger

    def forward(self, batch: Mapping[str, Any], divisor: float = 1.0) -> Tensor:
        """Return the summed loss of a micro-batch divided by `divisor`, a float32 scalar.

        Args:
            batch: `input_ids`, `position_ids`, `shift_labels` int64 (1, T), `cu_seqlens` int32 (n + 1,), `max_seqlen` int; or
                a rectangle: (R, P) of right-padded rows, one segment each, with or without `cu_seqlens`.
            divisor: Targets (or, weighted by document, segments with targets) of the whole step on all ranks.
        """
        z_loss = self.z_loss if self.training else 0.0
        labels = batch["shift_labels"].reshape(-1)
        weights = None
        if self.weighting == "document":
            weights = document_weights(labels, batch["cu_seqlens"] if "cu_seqlens" in batch else _row_offsets(labels, batch))
        model = unwrap(self.model)
        inputs = self._inputs(batch)
        head = model.get_output_embeddings()
        if not self.plain_head:
            logits = self._run(model, inputs).logits.flatten(0, 1)
            return chunked_cross_entropy(lambda x: x, logits, logits.shape[-1], labels, weights, z_loss) / divisor
        hidden = self._run(model.base_model, inputs).last_hidden_state.flatten(0, 1)
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
            vocab_size = model.config.get_text_config().vocab_size
            return chunked_cross_entropy(head, hidden, vocab_size, labels, weights, z_loss) / divisor
        return linear_cross_entropy(hidden, head.weight, head.bias, labels, weights, z_loss) / divisor

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        ids = batch["input_ids"]
        if self.backend is None:
            # Right-padded rows need no mask: causal attention never looks to the right, and padding has no target.
            return {"input_ids": ids}
        cu_seqlens = batch["cu_seqlens"] if "cu_seqlens" in batch else _row_offsets(ids, batch)
        longest = batch["max_seqlen"] if "max_seqlen" in batch else ids.shape[1]
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return {
            "input_ids": ids.reshape(1, -1),
            "position_ids": positions.reshape(1, -1),
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
            BACKEND_KEYWORD: self.backend,
        }

    def _run(self, module: nn.Module, inputs: dict[str, Any]) -> Any:
        if self.backend is None and "cu_seq_lens_q" in inputs:
            raise ModelError("native attention got packed rows; it would let documents see each other. Use a bucketed dataset")
        return module(**inputs, use_cache=False)


def _row_offsets(like: Tensor, batch: Mapping[str, Any]) -> Tensor:
    rows, width = batch["input_ids"].shape
    return torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=like.device)
