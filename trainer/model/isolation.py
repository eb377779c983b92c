"""Is a model safe on packed rows, and in which way? Proved on the model itself, layer by layer and as a whole.

`inspect_model` runs two short documents through the model: changing the first moves nothing in the second, also in
training mode, and the second packed equals the second alone under the model's native attention. Windows and chunks are
shrunk to 4 tokens meanwhile, so that a forgotten one shows. All is measured against a control, the same row with its
boundary removed: a probe that could not see a leak proves nothing and refuses too. What never reaches the numbers at
this size is refused in the attention function. Three ways are tried, the cheapest first:

1. attention layers call packed attention, other mixers (recurrent, convolutional) take the boundaries themselves;
2. mixers that let segments see each other run on rectangles (`unflatten.py`), everything else stays packed;
3. the body as a whole runs on rectangles, under the model's native attention; head and loss stay packed.
"""

import importlib.util
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shards.errors import ModelError, counted, reason_of
from trainer.model.attention import BACKEND_KEYWORD, IMPLEMENTATION, chunk_of, packrow, register, segment_ids
from trainer.model.backends import Needs, needs_of
from trainer.model.mixers import find_mixers, leaks, recorded_calls
from trainer.model.unflatten import Call, Unflattening

NOT_CAUSAL = "is not causal: a token sees later ones"
_WINDOW = 4
_FIRST, _SECOND = 11, 13  # longer than the window, and of unlike length
_THIRD = 7  # makes the longer of two rows, by which it shows what is per token
_EXACT, _ROUGH = 1e-3, 0.25
_RAISED = (
    ImportError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
)
_KERNELS = re.compile(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"(\w+)"')
_SHRUNK = {"sliding_window": _WINDOW, "attention_chunk_size": _WINDOW, "floor_scale": 2}
"Settings that act on long documents only, made small enough to act on the probe's."


@dataclass
class ModelReport:
    """What is known about a model's fitness for packed rows."""

    name: str
    model_type: str
    accepted: bool = False
    reason: str | None = None
    "Why it is refused."
    num_layers: int = 0
    ways: list[str] = field(default_factory=list)
    "How each kind of layer keeps documents apart, one line each."
    unflattening: Unflattening = field(default_factory=Unflattening)
    "The modules that run on rectangles; none of them where all take boundaries."
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
            *(f"  kind            {way}" for way in self.ways),
            f"  isolation       another first document moves the second by {self.leak:.1e} of what a leak would",
            f"  packed = alone  within {self.parity:.1e} of what a leak would move",
            f"  positions       {self.max_positions}{limit}",
            f"  vocabulary      {self.vocab_size} ids",
            f"  loss            {head}",
        ]
        return "\n".join(lines + [f"  note            {note}" for note in self.notes])


def refusal(config: Any) -> str | None:
    """Return why a configuration is refused, continuing "the model ...", or None if nothing does."""
    if getattr(config.get_text_config(), "is_encoder_decoder", False):
        return "is an encoder-decoder; packed rows train decoders only"
    return None


@contextmanager
def _small_windows(model: nn.Module) -> Iterator[None]:
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
def _recorded(calls: list[tuple[nn.Module, Needs]], *, alone: bool = False) -> Iterator[None]:
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
def _native(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    set_attention(model, "eager")
    try:
        yield
    finally:
        set_attention(model, before)


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


class _Probe:
    """Two documents and the ways to run them through one model."""

    def __init__(self, model: Any, positions: int) -> None:
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
        with _native(self.model):
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
        return ours.shape == logits.shape and _difference(ours, logits) <= 1e-3 * float(ours.abs().mean())


def _difference(left: Tensor, right: Tensor) -> float:
    """Return the mean difference: in bf16 a token may choose another expert for rounding alone, all of them may not."""
    return float((left - right).abs().mean())


def _failure(work: Callable[[], str | None]) -> str | None:
    """Return why a way does not work, whether it was measured or the model raised."""
    try:
        return work()
    except ModelError as error:
        return f"is not fit for packed attention: {str(error).rstrip('.')}"
    except _RAISED as error:
        return f"does not run on packed rows ({type(error).__name__}: {reason_of(error)})"


def _find_way(model: Any, report: ModelReport, probe: _Probe) -> str | None:
    """Bring the model into the first way that is proven; return why the last one is not, if none is."""
    unflattening = report.unflattening
    reason = _failure(lambda: _by_layers(model, report, probe))
    if reason is None:
        return None
    unflattening.undo()
    before = model.config._attn_implementation
    set_attention(model, native_attention(model))
    whole = _failure(lambda: NOT_CAUSAL if sees_ahead(model) else _as_a_whole(model, report, probe))
    if whole is not None:
        unflattening.undo()
        set_attention(model, before)
        return whole
    report.notes.append(f"packed layer by layer, the model {reason}")
    return None


def _by_layers(model: Any, report: ModelReport, probe: _Probe) -> str | None:
    """Pack attention, hand boundaries to the mixers that keep them, run the other mixers on rectangles."""
    body = body_of(model)
    attention: list[tuple[nn.Module, Needs]] = []
    with _recorded(attention, alone=True):
        short, long = probe.calls(body, long=False), probe.calls(body, long=True)
        mixers = find_mixers(body, short, long, probe.tokens, {module for module, _ in attention})
    loose, why = _loose(mixers, short, long, probe) if mixers else ({}, None)
    for name, module in loose.items():
        report.unflattening.wrap(module, name, short[module], long[module], probe.tokens)
        report.notes += _without_dropout(module)
    probe.hand_over = False
    report.unflattening.hands_over = len(loose) < len(mixers)
    if mixers:
        report.unflattening.follow(*{model, body})
    report.ways = [
        *_attention_lines(attention),
        *_mixer_lines(mixers.keys() - loose.keys(), mixers, "take the boundaries themselves"),
        *_mixer_lines(loose.keys(), loose, "run segment by segment, on rectangles" + _faster(loose, why)),
    ]
    return _measure(model, report, probe)


def _loose(
    mixers: dict[str, nn.Module], short: dict[nn.Module, Call], long: dict[nn.Module, Call], probe: _Probe
) -> tuple[dict[str, nn.Module], str | None]:
    """Return the mixers that do not keep segments apart when they are handed the boundaries, and what they said."""
    packed: dict[nn.Module, Call] = {}
    probe.hand_over = True
    try:
        loose: dict[str, nn.Module] = {}
        for training in (False, True):  # fused kernels often serve one of the two only
            with recorded_calls(probe.model, packed), _mode(probe.model, training):
                probe.packed(probe.first, probe.lengths)
                loose |= {
                    name: module
                    for name, module in mixers.items()
                    if leaks(module, packed[module], short[module], long[module], probe.tokens, probe.lengths[0])
                }
    except _RAISED as error:
        return mixers, reason_of(error)
    return loose, None


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
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


def _as_a_whole(model: Any, report: ModelReport, probe: _Probe) -> str | None:
    """Run the body on rectangles under native attention."""
    body = body_of(model)
    short, long = probe.calls(model, long=False), probe.calls(model, long=True)
    if body not in short:  # its parts are called one by one
        body = model
    report.unflattening.wrap(body, "the body", short[body], long[body], probe.tokens)
    report.unflattening.follow(*{model, body})
    report.ways = [f"all layers: run segment by segment, on rectangles, with transformers' {native_attention(model)}"]
    return _measure(model, report, probe)


def _without_dropout(module: nn.Module) -> list[str]:
    """Set dropout inside a mixer to 0: on rectangles it would fall on other tokens than in a packed row."""
    notes = []
    for each in module.modules():
        if isinstance(each, nn.Dropout) and each.p > 0:
            notes.append(f"dropout {each.p} inside {type(module).__name__} is set to 0, as it mixes tokens")
            each.p = 0.0
    return list(dict.fromkeys(notes))


def _attention_lines(calls: list[tuple[nn.Module, Needs]]) -> list[str]:
    """Say which attention layers there are, one line for each kind."""
    kinds: dict[str, set[nn.Module]] = {}
    for module, needs in calls:
        chunk = chunk_of(module)
        what = [
            f"heads of {needs.head_dim}" + (f" and {needs.value_dim}" if needs.value_dim != needs.head_dim else ""),
            *(["sliding window"] if needs.sliding_window else []),
            *(["chunks"] if chunk else []),
            *([f"soft-cap {needs.softcap:g}"] if needs.softcap else []),
            *(["sinks"] if needs.sinks else []),
        ]
        kinds.setdefault(f"{type(module).__name__} ({', '.join(what)})", set()).add(module)
    return [f"{kind}, {counted(len(modules), 'layer')}: packed attention" for kind, modules in kinds.items()]


def _mixer_lines(names: Iterable[str], mixers: dict[str, nn.Module], how: str) -> list[str]:
    counts = Counter(type(mixers[name]).__name__ for name in names)
    return [f"{kind}, {counted(count, 'layer')}: {how}" for kind, count in counts.items()]


def _faster(mixers: dict[str, nn.Module], said: str | None) -> str:
    """Name the packages whose kernels would take the boundaries, where transformers' code names some."""
    sources = {type(module).__module__ for module in mixers.values()}
    text = " ".join(inspect.getsource(sys.modules[name]) for name in sources)
    packages = sorted(set(_KERNELS.findall(text)))
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f" ({' and '.join(missing)} would be faster)" if missing or said else ""


def _measure(model: Any, report: ModelReport, probe: _Probe) -> str | None:
    """Fill the report's measurements; return the reason to refuse the model, if any."""
    calls: list[tuple[nn.Module, Needs]] = []
    lengths = probe.lengths
    with _recorded(calls):
        packed = probe.packed(probe.first, lengths)
    report.attention_calls = len(calls)
    report.needs = list(dict.fromkeys(needs for _, needs in calls))
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
    if report.unflattening.modules:
        report.unflattening.slack = 5
        padded = _difference(probe.packed(probe.first, lengths), packed) / scale
        report.unflattening.slack = 0
        if not padded <= tolerance:
            return f"computes something else where rows are padded (off by {padded:.1e} of a full leak)"
    return _measure_training(model, probe, tolerance)


def _measure_training(model: Any, probe: _Probe, tolerance: float) -> str | None:
    """Look for a leak in training mode, where attention dropout raises and other kernels may run."""
    results = []
    for first, lengths in ((probe.first, probe.lengths), (probe.other, probe.lengths), (probe.first, None)):
        with torch.random.fork_rng(devices=[probe.device] if probe.device.type == "cuda" else []):
            torch.manual_seed(0)  # dropout falls on the same places
            model.train()
            results.append(probe.packed(first, lengths or [sum(probe.lengths)]))
    model.eval()
    leak = _difference(results[1], results[0]) / (_difference(results[2], results[0]) or float("inf"))
    if not leak <= tolerance:
        return f"lets a document see the one before it in training (its outputs move by {leak:.1e} of a full leak)"
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


def inspect_model(model: Any, name: str, *, random: bool = False) -> ModelReport:
    """Check a loaded model on its own device and bring it into the way in which it is safe.

    Weights, mode and settings are left as they were; modules may be wrapped (`report.unflattening`), and a model that
    runs on rectangles as a whole gets native attention.

    Args:
        model: A causal language model that `refusal` lets pass; its attention implementation is `packrow`.
        name: What to call it in the report.
        random: Whether the weights are fresh.
    """
    config = model.config.get_text_config()
    report = ModelReport(name=name, model_type=config.model_type)
    report.num_layers = getattr(config, "num_hidden_layers", 0)
    report.vocab_size = model.get_input_embeddings().weight.shape[0]
    report.max_positions, report.position_limit = position_limit(model)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _small_windows(model), large_weights(model, random):
            probe = _Probe(model, report.max_positions or _FIRST + _SECOND + _THIRD)
            report.reason = _find_way(model, report, probe)
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
