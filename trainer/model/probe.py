"""Two short documents and the ways to run them through a model, its windows shrunk so that a forgotten one shows."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.model.attention import BACKEND_KEYWORD, IMPLEMENTATION, packrow, register, segment_ids
from trainer.model.backends.interface import Needs, needs_of
from trainer.model.mixers import recorded_calls
from trainer.model.unflatten import Call

_WINDOW = 4
_FIRST, _SECOND = 11, 13  # longer than the window, and of unlike length
_THIRD = 7  # makes the longer of two rows, by which it shows what is per token
_SHRUNK = {"sliding_window": _WINDOW, "attention_chunk_size": _WINDOW, "floor_scale": 2}
"Settings that act on long documents only, made small enough to act on the probe's."


@contextmanager
def small_windows(model: nn.Module) -> Iterator[None]:
    """Shrink sliding windows, chunks and the like to a few tokens, in configurations and modules alike."""
    config: Any = model.config
    holders: list[Any] = [*{id(c): c for c in (config, config.get_text_config())}.values(), *model.modules()]
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    found = [
        (holder, name, value)
        for holder in holders
        for name in _SHRUNK
        if isinstance(value := getattr(holder, name, None), (int, float))
        # A window as long as the positions cannot bite, and some models do not apply it; a row may be longer, though.
        and 0 < value < (math.inf if name == "floor_scale" else positions)
    ]
    for holder, name, _ in found:
        setattr(holder, name, _SHRUNK[name])
    try:
        yield
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)


@contextmanager
def recorded(calls: list[tuple[nn.Module, Needs]], *, alone: bool = False) -> Iterator[None]:
    """Note the layer and the needs of every call of packed attention.

    Args:
        alone: Take a row without boundaries as one document, so that nothing else in the model sees any.
    """
    from transformers import AttentionInterface

    def recorder(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kwargs: Any) -> Any:
        calls.append((module, needs_of(query, key, value, kwargs)))
        if alone:
            kwargs |= packed_kwargs([query.shape[-2]], query.device)
        return packrow(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(IMPLEMENTATION, recorder)
    try:
        yield
    finally:
        register()


@contextmanager
def native(model: Any) -> Iterator[None]:
    """Let a model run with transformers' eager attention meanwhile."""
    before = model.config._attn_implementation
    set_attention(model, "eager")
    try:
        yield
    finally:
        set_attention(model, before)


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode, dropout layers always into the latter."""
    before = model.training
    model.train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    try:
        yield
    finally:
        model.train(before)


def set_attention(model: Any, name: str) -> None:
    """Let a model run with another attention, also one whose layers have their own: there it decides on the mask."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    for config in (model.config, model.config.get_text_config()):
        config._attn_implementation = name


def native_attention(model: Any) -> str:
    """Return the attention of transformers itself that a model runs with."""
    return "sdpa" if model._supports_sdpa and model._can_set_attn_implementation() else "eager"


def body_of(model: Any) -> nn.Module:
    """Return the part of a causal language model below its head; the model itself where it has none."""
    return cast(nn.Module, model.base_model)


def packed_kwargs(lengths: list[int], device: torch.device, *, hand_over: bool = False) -> dict[str, Any]:
    """Return what a forward over segments of these lengths takes beside `input_ids`, on the segment loop."""
    offsets = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    more = {"seq_idx": segment_ids(offsets, sum(lengths))} if hand_over else {}
    return {
        **more,
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
        BACKEND_KEYWORD: "cpu",
    }


def logits_of_a_row(model: Any) -> Tensor:
    """Return a model's logits on one short document of random tokens, float32 (1, T, V)."""
    words = model.get_input_embeddings().weight
    ids = torch.randint(0, len(words), (1, _FIRST), generator=torch.Generator().manual_seed(0)).to(words.device)
    positions = torch.arange(_FIRST, device=words.device)[None]
    training = model.training
    model.eval()
    logits = model(input_ids=ids, position_ids=positions, **packed_kwargs([_FIRST], words.device)).logits
    model.train(training)
    return cast(Tensor, logits.float())


class Probe:
    """Two documents and the ways to run them through one model."""

    def __init__(self, model: Any, positions: int | None) -> None:
        positions = positions or _FIRST + _SECOND + _THIRD
        self.model = model
        self.lengths = [min(_FIRST, positions), min(_SECOND, positions)]
        self.device = model.get_input_embeddings().weight.device
        self.hand_over = False
        "Whether layers get `seq_idx` too."
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.get_input_embeddings().weight.shape[0]
        self.first, self.other, self.second, self.third = (
            torch.randint(0, vocab_size, (1, n), generator=generator).to(self.device)
            for n in (self.lengths[0], self.lengths[0], self.lengths[1], _THIRD)
        )
        longest = min(sum(self.lengths) + _THIRD, positions)
        self.tokens = min(sum(self.lengths), longest - 1), longest
        "Of two rows that are one document each; what differs between their calls is per token."

    def packed(self, first: Tensor, lengths: list[int]) -> Tensor:
        """Return the logits of the second document behind `first`, with boundaries at `lengths`."""
        ids = torch.cat([first, self.second], dim=1)
        positions = torch.cat([torch.arange(n) for n in self.lengths])[None].to(self.device)
        kwargs = packed_kwargs(lengths, self.device, hand_over=self.hand_over)
        logits = self.model(input_ids=ids, position_ids=positions, **kwargs).logits
        return cast(Tensor, logits[0, self.lengths[0] :].float())

    def alone(self) -> Tensor:
        """Return the logits of the second document by itself under native attention."""
        with native(self.model):
            return cast(Tensor, self.model(input_ids=self.second, use_cache=False).logits[0].float())

    def calls(self, body: nn.Module, *, long: bool) -> dict[nn.Module, Call]:
        """Return the call of every module in a forward over a row that is one document."""
        calls: dict[nn.Module, Call] = {}
        ids = torch.cat([self.first, self.second, self.third], dim=1)[:, : self.tokens[long]]
        with recorded_calls(body, calls):
            self.model(input_ids=ids, use_cache=False)
        return calls

    def has_plain_head(self) -> bool:
        """Return whether the output layer on the body's last hidden state gives the model's logits."""
        head, body = self.model.get_output_embeddings(), self.model.base_model
        if head is None or body is self.model:
            return False
        kwargs = packed_kwargs(self.lengths[1:], self.device, hand_over=self.hand_over)
        positions = torch.arange(self.lengths[1], device=self.device)[None]
        # Amplified, since a soft-cap of 30 leaves the small logits of a fresh model as they are.
        hook = head.register_forward_hook(lambda module, args, logits: logits * 1e3)
        try:
            hidden = getattr(body(input_ids=self.second, position_ids=positions, **kwargs), "last_hidden_state", None)
            if hidden is None:
                return False
            ours = head(hidden).float()
            logits = self.model(input_ids=self.second, position_ids=positions, **kwargs).logits.float()
        finally:
            hook.remove()
        return ours.shape == logits.shape and difference(ours, logits) <= 1e-3 * float(ours.abs().mean())


def difference(left: Tensor, right: Tensor) -> float:
    """Return the mean difference: in bf16 a token may choose another expert for rounding alone, all of them may not."""
    return float((left - right).abs().mean())


def sees_ahead(model: Any) -> bool:
    """Return whether outputs change with tokens that come later, so that a loss would score what was seen."""
    words = model.get_input_embeddings().weight
    half = max(1, min(_FIRST, (position_limit(model)[0] or 2 * _FIRST) // 2))
    generator = torch.Generator().manual_seed(0)
    first, one, other = (torch.randint(0, len(words), (1, half), generator=generator) for _ in range(3))
    training = model.training
    model.eval()
    with torch.no_grad():
        left, right = (
            model(input_ids=torch.cat([first, end], dim=1).to(words.device), use_cache=False).logits[0].float()
            for end in (one, other)
        )
    model.train(training)
    return difference(left[:half], right[:half]) > 1e-3 * difference(left[half:], right[half:])


def position_limit(model: Any) -> tuple[int | None, str | None]:
    """Return the number of positions a model was made for and why a segment must not be longer, if it must not."""
    config = model.config.get_text_config()
    limit, words = getattr(config, "max_position_embeddings", None), model.get_input_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module is words or module.num_embeddings < (limit or 0):
            continue  # a small one is of the places in an image
        if "pos" in name or name.endswith("wpe"):
            return limit, "its learned position table ends there"
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(x for x in rope.values() if isinstance(x, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            limit = part.get("original_max_position_embeddings") or limit
            return limit, "beyond it, its rotary frequencies for every document depend on the longest one in the row"
    return limit, None


@contextmanager
def large_weights(model: nn.Module, random: bool) -> Iterator[None]:
    """Quadruple the matrices of a model with fresh weights: they are so small that attention scores hardly matter.

    Products with a power of two are exact, so the weights come back bit by bit.
    """
    large = [m for m in model.modules() if random and type(m).__name__ in ("Linear", "Conv1D", "Embedding")]
    matrices = list({id(m.weight): cast(Tensor, m.weight) for m in large}.values())  # tied ones once
    for weight in matrices:
        weight.mul_(4)
    try:
        yield
    finally:
        for weight in matrices:
            weight.mul_(0.25)
