"""Summed cross-entropy of packed rows, never holding all logits: `PackedLM`, the module that a training loop calls.

The body runs once over the row; head and loss run chunk by chunk, at most 64 Mi logits at a time (32k tokens and 128k
words would make 16 GiB of fp32 logits, and as much again for their gradient). A plain linear head takes
`_LinearCrossEntropy`, which makes the gradients while the logits are there (3 matrix products; recomputing takes 4), or
liger's fused kernel; a head that is more than a matrix (LoRA on it) is called chunk by chunk and recomputed in
backward; a model that scales or soft-caps its logits makes them itself. The sum is divided by a number that the caller
knows for the whole step, so that no split of a step into micro-batches and ranks changes the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shards.errors import ModelError
from trainer.batch import IGNORED
from trainer.model.attention import BACKEND_KEYWORD
from trainer.model.backends.interface import Backends, Needs
from trainer.model.liger import fused_cross_entropy, unusable_reason
from trainer.model.unflatten import LAYOUT_KEYWORD, needs_rectangles


def _chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Return the rows of a chunk: large products on a GPU, logits that stay in the cache on a CPU."""
    return max(128, (1 << 22 if device.type == "cpu" else 1 << 26) // vocab_size)


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted sum of token losses under a linear head, its gradients made chunk by chunk in forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None,
        z_loss: float, dtype: torch.dtype, with_grads: bool, token_losses: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Arguments as for `linear_cross_entropy`; `dtype` is the type of the matrix products."""
        wants_hidden, wants_weight, wants_bias = (with_grads and wanted for wanted in ctx.needs_input_grad[:3])
        matrix = weight.to(dtype)
        offset = None if bias is None else bias.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Sums over chunks stay in fp32: dozens of bf16 additions would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        rows = _chunk_rows(len(weight), hidden.device)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            inputs = hidden[chunk].to(dtype)
            loss, grad = _loss_and_logit_grad(
                F.linear(inputs, matrix, offset).float(),
                labels[chunk],
                None if weights is None else weights[chunk],
                z_loss,
                None if token_losses is None else token_losses[chunk],
            )
            total += loss
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            if grad_hidden is not None or grad_weight is not None:
                grad = grad.to(dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ matrix
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), inputs)
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the stored gradients; for a scalar loss nothing else is left to do."""
        stored = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return (*stored, *[None] * 6)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _loss_and_logit_grad(
    logits: Tensor, labels: Tensor, weights: Tensor | None, z_loss: float, token_losses: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a chunk's weighted loss and its gradient by the fp32 logits, which is written over them.

    `token_losses` gets the loss of each token, 0 where there is no target.
    """
    valid = (labels != IGNORED).float()
    scale = valid if weights is None else weights * valid
    target = labels.clamp(min=0).unsqueeze(1)
    lse = torch.logsumexp(logits, dim=1)
    losses = lse - logits.gather(1, target).squeeze(1)
    if token_losses is not None:
        torch.mul(losses, valid, out=token_losses)
    grad = logits.sub_(lse.unsqueeze(1)).exp_()
    if z_loss:
        losses = losses + z_loss * lse.square()
        grad *= (1 + 2 * z_loss * lse).unsqueeze(1)
    grad.scatter_add_(1, target, torch.full_like(lse, -1.0).unsqueeze(1))
    return torch.dot(losses, scale), grad.mul_(scale.unsqueeze(1))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    token_losses: Tensor | None = None,
) -> Tensor:
    """Sum token losses under a linear head without holding all logits.

    Args:
        hidden: (T, D), floating.
        weight: (V, D); `bias` (V,) or None.
        labels: int64 (T,), -100 where there is no target.
        weights: float32 (T,), a factor on each token's loss; None for 1.
        z_loss: Factor on the squared log of the softmax's denominator.
        token_losses: float32 (T,), gets each token's own loss, without weight and z-loss; 0 where there is no target.

    Returns:
        float32 scalar; 0, with gradients of 0, where no token is a target.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        # Grad mode is always off inside the function, so it has to be told.
        with_grads = torch.is_grad_enabled()
        apply = cast(Callable[..., Tensor], _LinearCrossEntropy.apply)
        return apply(hidden, weight, bias, labels, weights, z_loss, dtype, with_grads, token_losses)


def chunked_cross_entropy(
    logits_of: Callable[[Tensor], Tensor],
    inputs: Tensor,
    vocab_size: int,
    labels: Tensor,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    token_losses: Tensor | None = None,
) -> Tensor:
    """Sum token losses under any head, chunk by chunk, each recomputed in backward.

    Args:
        logits_of: Maps a chunk of `inputs` to its logits (rows, V).
        inputs: (T, ...), cut along the first axis.
        vocab_size: V, which sets the rows of a chunk.
        labels: Like `weights`, `z_loss`, `token_losses` and the result as for `linear_cross_entropy`.
    """

    def chunk_loss(start: int, chunk: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        logits = logits_of(chunk).float()
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        if token_losses is not None:
            token_losses[start : start + len(labels)] = losses.detach()
        if z_loss:
            losses = losses + z_loss * torch.logsumexp(logits, dim=1).square() * (labels != IGNORED)
        return (losses if weights is None else losses * weights).sum()

    rows = _chunk_rows(vocab_size, labels.device)
    losses = []
    for start in range(0, len(labels), rows):
        chunk = slice(start, start + rows)
        part = None if weights is None else weights[chunk]
        losses.append(checkpoint(chunk_loss, start, inputs[chunk], labels[chunk], part, use_reentrant=False))
    return torch.stack(losses).sum()


def document_weights(labels: Tensor, cu_seqlens: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return each token's share of the targets of its segment, computed on the device without a sync.

    Args:
        labels: int64 (T,), -100 where there is no target.
        cu_seqlens: int32 (n + 1,), last exactly T.
        weights: float32 (T,), 0 where there is no target; None for 1 at every target.

    Returns:
        float32 (T,); over the targets of any one segment it sums to 1.
    """
    tokens = torch.arange(len(labels), device=labels.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    counts = torch.zeros(len(cu_seqlens) - 1, dtype=torch.float32, device=labels.device)
    if weights is not None:
        counts = counts.index_add(0, segment, weights)
        return weights / counts.clamp(min=torch.finfo(torch.float32).tiny)[segment]
    counts = counts.index_add(0, segment, (labels != IGNORED).float())
    return counts.clamp(min=1).reciprocal()[segment]


def unwrap(model: nn.Module) -> Any:
    """Return the causal language model inside a peft wrapper, or the model itself."""
    return cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model


class PackedLM(nn.Module):
    """A causal language model whose forward is the loss of one micro-batch; wrap this in DDP or FSDP2.

    Args:
        model: From `load_model`, wrapped by peft or not.
        backend: Key of `ATTENTION_BACKENDS`, or one by widths of heads; None for native attention, which takes
            rectangles only.
        needs: What the attention layers ask of a backend, for whoever chooses another one of those that serve.
        plain_head: Whether logits are exactly `lm_head(hidden)`, as the model's report says.
        weighting: `token`: every target counts 1. `document`: the targets of each segment count 1 together.
        z_loss: Factor on the squared log of the softmax's denominator; left out in `eval()` mode.
        liger: `auto`, `on` or `off`: liger's fused loss on a GPU, where head and weighting allow it; targets that have
            weights of their own never take it.

    Raises:
        ModelError: `liger` is `on`, but head or weighting does not allow it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        backend: Backends | None,
        needs: Sequence[Needs] = (),
        plain_head: bool,
        weighting: str = "token",
        z_loss: float = 0.0,
        liger: str = "auto",
    ) -> None:
        super().__init__()
        if liger == "on" and not (plain_head and weighting == "token"):
            raise ModelError(
                '`liger="on"`: its fused loss takes plain heads and weighting by token; this head is '
                f"{'plain' if plain_head else 'scaled or soft-capped'}, weighting is by {weighting}. "
                'Use `liger="auto"`.'
            )
        self.model = model
        self.backend, self.needs = backend, needs
        self.plain_head = plain_head
        self.needs_rectangles = needs_rectangles(unwrap(model))
        self.weighting = weighting
        self.z_loss = z_loss
        self.token_losses: Tensor | None = None
        "Where the next forward writes each token's own loss: float32 (T,); liger's fused loss is then left out."
        self.fused = liger != "off" and weighting == "token"

    def forward(self, batch: Mapping[str, Any], divisor: float = 1.0) -> Tensor:
        """Return the summed loss of a micro-batch divided by `divisor`, a float32 scalar.

        Args:
            batch: `input_ids`, `position_ids`, `shift_labels` int64 (1, T), `cu_seqlens` int32 (n + 1,), `max_seqlen`
                int, `shift_weights` float32 (1, T) where targets have weights, `rectangles` if a loader planned them.
                Or the same of a rectangle (R, P) of right-padded
                rows, one segment each. With `logits_at`, int64 (n,), no labels are needed, and the logits of these
                tokens of the flattened batch are returned instead, float32 (n, V).
            divisor: Targets of the whole step on all ranks, the sum of their weights where they have some (weighted by
                document: segments with targets).

        Raises:
            ModelError: Packed rows for a model on native attention.
        """
        inputs = self._native_inputs(batch) if self.backend is None else self._inputs(batch)
        if "logits_at" in batch:
            return self._logits(inputs, batch["logits_at"])
        labels = batch["shift_labels"].flatten()
        weights = batch["shift_weights"].flatten() if "shift_weights" in batch else None
        if self.weighting == "document":
            weights = document_weights(labels, batch["cu_seqlens"], weights)
        return self._summed_loss(inputs, labels, weights) / divisor

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.needs_rectangles:
            more[LAYOUT_KEYWORD] = batch.get("rectangles")  # without them they are planned now, which waits for a GPU
        return {
            **more,
            "input_ids": batch["input_ids"].reshape(1, -1),
            "position_ids": batch["position_ids"].reshape(1, -1),
            "cu_seq_lens_q": batch["cu_seqlens"],
            "cu_seq_lens_k": batch["cu_seqlens"],
            "max_length_q": batch["max_seqlen"],
            "max_length_k": batch["max_seqlen"],
            BACKEND_KEYWORD: self.backend,
        }

    def _native_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        ids, segments = batch["input_ids"], len(batch["cu_seqlens"]) - 1
        if segments > len(ids):
            raise ModelError(
                f"native attention: {segments} segments in {len(ids)} rows would see each other; expected "
                "one in a row. Use a bucketed dataset."
            )
        # No mask: padding is on the right, where causal attention does not look, and has no target.
        return {"input_ids": ids}

    def _logits(self, inputs: dict[str, Any], at: Tensor) -> Tensor:
        model = unwrap(self.model)
        if not self.plain_head:
            logits: Tensor = model(**inputs, use_cache=False).logits.flatten(0, 1)[at]
        else:
            hidden = model.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            logits = model.get_output_embeddings()(hidden[at])
        return logits.float()

    def _summed_loss(self, inputs: dict[str, Any], labels: Tensor, weights: Tensor | None) -> Tensor:
        model = unwrap(self.model)
        z_loss = self.z_loss if self.training else 0.0
        if not self.plain_head:
            logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
            vocab_size = logits.shape[-1]
            return chunked_cross_entropy(
                lambda chunk: chunk, logits, vocab_size, labels, weights, z_loss, self.token_losses
            )
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        head = model.get_output_embeddings()
        # Exactly these types: LoRA, quantised and sharded heads are more than their weight says.
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
            vocab_size = model.config.get_text_config().vocab_size
            return chunked_cross_entropy(head, hidden, vocab_size, labels, weights, z_loss, self.token_losses)
        # The kernel makes all gradients in forward, and none where hidden states want none: a frozen body.
        usable = self.fused and weights is None and self.token_losses is None
        if usable and hidden.is_cuda and hidden.requires_grad and unusable_reason() is None:
            return fused_cross_entropy(hidden, head.weight, head.bias, labels, z_loss)
        return linear_cross_entropy(hidden, head.weight, head.bias, labels, weights, z_loss, self.token_losses)
