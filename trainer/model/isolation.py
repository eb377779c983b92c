"""Is a model safe on packed rows? By name first, then by proof.

`refusal` reads the configuration: layer types that are not on the list, soft-caps, families known to leak or to build
masks of their own. `inspect_model` then runs two short documents through the model itself: changing the first moves
nothing in the second, the second packed equals the second alone under the model's native attention, and every layer
called packed attention equally often. Windows are shrunk to 4 tokens meanwhile, so that a forgotten one shows. All is
measured against a control, the same row with its boundary removed: a probe that could not see a leak proves nothing and
refuses too. What never reaches the numbers at this size (soft-caps, sinks) is refused in the attention function.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shards.errors import ModelError, reason_of
from trainer.model.attention import BACKEND_KEYWORD, IMPLEMENTATION, packrow, register
from trainer.model.backends import Needs, needs_of

_ALLOWED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_STATE = "carries recurrent state from one document into the next"
_OWN_MASK = "builds a dense mask of its own instead of calling transformers' attention interface"
_REFUSED = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "bamba"), _STATE),
    **dict.fromkeys(("zamba", "zamba2", "nemotron_h", "falcon_h1", "qwen3_next"), _STATE),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "carries a convolution from one document into the next"),
    **dict.fromkeys(("gpt_neo", "falcon", "bloom", "mpt", "xglm", "ctrl", "xlnet", "openai-gpt"), _OWN_MASK),
    **dict.fromkeys(("stablelm", "nemotron"), "does not hand keyword arguments through to its attention layers"),
}
_WINDOW = 4
_FIRST, _SECOND = 11, 13  # longer than the window, and of unlike length
_EXACT, _ROUGH = 1e-3, 0.25


@dataclass
class ModelReport:
    """What is known about a model's fitness for packed rows."""

    name: str
    model_type: str
    accepted: bool = False
    reason: str | None = None
    "Why it is refused."
    num_layers: int = 0
    attention_calls: int = 0
    "Calls of packed attention in one forward."
    needs: list[Needs] = field(default_factory=list)
    "Distinct shapes of attention."
    windows: list[int] = field(default_factory=list)
    "Distinct sliding windows, in tokens."
    leak: float = float("nan")
    "Mean change in the second document when the first one changes, relative to `control`."
    parity: float = float("nan")
    "Mean difference of the second document, packed against alone, relative to `control`."
    control: float = float("nan")
    "Mean change in the second document when the boundary is removed, in units of logits."
    plain_head: bool = False
    "Logits are exactly `lm_head(hidden)`: no scale, no soft-cap."
    vocab_size: int = 0
    max_positions: int | None = None
    position_limit: str | None = None
    "Why no segment may be longer than `max_positions`; None where longer ones are merely untrained."
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the report for a person to read."""
        if not self.accepted:
            return f"{self.name} ({self.model_type}): refused, it {self.reason}."
        windows = f"windows of {', '.join(map(str, self.windows))} tokens" if self.windows else "no sliding window"
        limit = f" at most: {self.position_limit}" if self.position_limit else ""
        head = (
            "in chunks, from hidden states" if self.plain_head else "from its own logits (scaled or soft-capped head)"
        )
        lines = [
            f"{self.name} ({self.model_type}): safe to pack",
            f"  layers          {self.num_layers}, {self.attention_calls} attention calls, {windows}",
            f"  isolation       another first document moves the second by {self.leak:.1e} of what a leak would",
            f"  packed = alone  within {self.parity:.1e} of what a leak would move",
            f"  positions       {self.max_positions}{limit}",
            f"  vocabulary      {self.vocab_size} ids",
            f"  loss            {head}",
        ]
        return "\n".join(lines + [f"  note            {note}" for note in self.notes])


def refusal(config: Any) -> str | None:
    """Return why a configuration is refused, continuing "the model ...", or None if nothing does."""
    text = config.get_text_config()
    for kind in (config.model_type, text.model_type):
        if kind in _REFUSED:
            return _REFUSED[kind]
    if getattr(text, "is_encoder_decoder", False):
        return "is an encoder-decoder; packed rows train decoders only"
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if odd := sorted({str(kind) for kind in types} - _ALLOWED_LAYERS):
        return f"has layers of type {', '.join(odd)}; packed attention knows full and sliding-window layers"
    if getattr(text, "attention_chunk_size", None):
        return "has chunked attention layers; packed attention knows full and sliding-window layers"
    if getattr(text, "alibi", False):
        return "adds ALiBi biases to attention scores, which packed attention leaves out"
    return None


@contextmanager
def _small_windows(model: nn.Module) -> Iterator[None]:
    """Shrink all sliding windows to a few tokens, in configurations and modules alike."""
    config: Any = model.config
    holders: list[Any] = [*{id(c): c for c in (config, config.get_text_config())}.values(), *model.modules()]
    found = [(x, x.sliding_window) for x in holders if isinstance(getattr(x, "sliding_window", None), int)]
    for holder, _ in found:
        holder.sliding_window = _WINDOW
    try:
        yield
    finally:
        for holder, window in found:
            holder.sliding_window = window


@contextmanager
def _recorded(calls: list[tuple[int, Needs]]) -> Iterator[None]:
    """Note the layer and the needs of every call of packed attention."""
    from transformers import AttentionInterface

    def recorder(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((id(module), needs_of(query, key, value, kwargs)))
        return packrow(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(IMPLEMENTATION, recorder)
    try:
        yield
    finally:
        register()


@contextmanager
def _native(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def packed_kwargs(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Return what a forward over segments of these lengths takes beside `input_ids`, on the segment loop."""
    offsets = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
        BACKEND_KEYWORD: "cpu",
    }


class _Probe:
    """Two documents and the ways to run them through one model."""

    def __init__(self, model: Any, positions: int) -> None:
        self.model = model
        self.lengths = [min(_FIRST, positions), min(_SECOND, positions)]
        self.device = model.get_input_embeddings().weight.device
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.get_input_embeddings().weight.shape[0]
        self.first, self.other, self.second = (
            torch.randint(0, vocab_size, (1, self.lengths[i]), generator=generator).to(self.device) for i in (0, 0, 1)
        )

    def packed(self, first: Tensor, lengths: list[int]) -> Tensor:
        """Return the logits of the second document behind `first`, with boundaries at `lengths`."""
        ids = torch.cat([first, self.second], dim=1)
        positions = torch.cat([torch.arange(n) for n in self.lengths])[None].to(self.device)
        logits = self.model(input_ids=ids, position_ids=positions, **packed_kwargs(lengths, self.device)).logits
        return cast(Tensor, logits[0, self.lengths[0] :].float())

    def alone(self) -> Tensor:
        """Return the logits of the second document by itself under native attention."""
        with _native(self.model):
            return cast(Tensor, self.model(input_ids=self.second, use_cache=False).logits[0].float())

    def has_plain_head(self) -> bool:
        """Return whether the output layer on the body's last hidden state gives the model's logits."""
        head, body = self.model.get_output_embeddings(), self.model.base_model
        if head is None or body is self.model:
            return False
        kwargs = packed_kwargs(self.lengths[1:], self.device)
        positions = torch.arange(self.lengths[1], device=self.device)[None]
        # Amplified, since a soft-cap of 30 leaves the small logits of a fresh model as they are.
        hook = head.register_forward_hook(lambda module, args, logits: logits * 1e3)
        try:
            hidden = body(input_ids=self.second, position_ids=positions, **kwargs).last_hidden_state
            ours = head(hidden).float()
            logits = self.model(input_ids=self.second, position_ids=positions, **kwargs).logits.float()
        finally:
            hook.remove()
        return ours.shape == logits.shape and _difference(ours, logits) <= 1e-3 * float(ours.abs().mean())


def _difference(left: Tensor, right: Tensor) -> float:
    """Return the mean difference: in bf16 a token may choose another expert for rounding alone, all of them may not."""
    return float((left - right).abs().mean())


def _measure(model: Any, report: ModelReport) -> str | None:
    """Fill the report's measurements; return the reason to refuse the model, if any."""
    probe = _Probe(model, report.max_positions or _SECOND)
    calls: list[tuple[int, Needs]] = []
    lengths = probe.lengths
    with _recorded(calls):
        packed = probe.packed(probe.first, lengths)
    counts = Counter(module for module, _ in calls)
    report.attention_calls = len(calls)
    report.needs = list(dict.fromkeys(needs for _, needs in calls))
    if len(counts) != report.num_layers or len(set(counts.values())) != 1:
        return (
            f"calls packed attention from {len(counts)} modules, not from each of its {report.num_layers} layers alike"
        )
    report.control = _difference(probe.packed(probe.first, [sum(lengths)]), packed)
    scale = report.control or float("inf")
    report.leak = _difference(probe.packed(probe.other, lengths), packed) / scale
    report.parity = _difference(probe.alone(), packed) / scale
    report.plain_head = probe.has_plain_head()
    if not 1e-4 * float(packed.std()) < report.control < float("inf"):
        return "shows no effect between documents even without a boundary, so that isolation cannot be proven"
    tolerance = _EXACT if _is_exact(model) else _ROUGH
    if not report.leak <= tolerance:
        return f"lets a document see the one before it (its outputs move by {report.leak:.1e} of a full leak)"
    if not report.parity <= tolerance:
        return f"computes something else packed than alone (off by {report.parity:.1e} of a full leak)"
    model.train()
    probe.packed(probe.first, lengths)  # attention dropout shows in training only, and raises
    return None


def _is_exact(model: nn.Module) -> bool:
    """Return whether the model computes in fp32 rather than in bf16, fp16 or TF32."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    narrow = weight.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return weight.dtype in (torch.float32, torch.float64) and not narrow


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
    return _difference(left[:half], right[:half]) > 1e-3 * _difference(left[half:], right[half:])


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


def inspect_model(model: Any, name: str) -> ModelReport:
    """Check a loaded model on its own device; weights, mode and attention are left as they were.

    Args:
        model: A causal language model that `refusal` lets pass; its attention implementation is `packrow`.
        name: What to call it in the report.
    """
    config = model.config.get_text_config()
    report = ModelReport(name=name, model_type=config.model_type, num_layers=config.num_hidden_layers)
    report.vocab_size = model.get_input_embeddings().weight.shape[0]
    report.max_positions, report.position_limit = position_limit(model)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _small_windows(model):
            report.reason = _measure(model, report)
    except ModelError as error:
        report.reason = f"is not fit for packed attention: {error}"
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        report.reason = f"does not run on packed rows ({type(error).__name__}: {reason_of(error)})"
    finally:
        model.train(training)
    report.windows = _windows(config)
    real = report.windows[0] if report.windows else None
    report.needs = [replace(each, sliding_window=each.sliding_window and real) for each in report.needs]
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts and getattr(config, "router_aux_loss_coef", 0):
        report.notes.append("its loss for balancing experts is left out; the loss is cross-entropy alone")
    report.accepted = report.reason is None
    return report


def _windows(config: Any) -> list[int]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return [window] if isinstance(window, int) and (not types or "sliding_attention" in types) else []
