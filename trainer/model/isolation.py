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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shards.errors import ModelError, reason_of
from trainer.model.backends.interface import Needs
from trainer.model.mixers import find_mixers, leaks, recorded_calls
from trainer.model.probe import (
    Probe,
    body_of,
    difference,
    large_weights,
    mode,
    native_attention,
    position_limit,
    recorded,
    sees_ahead,
    set_attention,
    small_windows,
)
from trainer.model.report import ModelReport, attention_lines, faster, mixer_lines
from trainer.model.unflatten import Call

NOT_CAUSAL = "is not causal: a token sees later ones"
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


def refusal(config: Any) -> str | None:
    """Return why a configuration is refused, continuing "the model ...", or None if nothing does."""
    if getattr(config.get_text_config(), "is_encoder_decoder", False):
        return "is an encoder-decoder; packed rows train decoders only"
    return None


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
        with torch.no_grad(), small_windows(model), large_weights(model, random):
            probe = Probe(model, report.max_positions)
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


def _find_way(model: Any, report: ModelReport, probe: Probe) -> str | None:
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


def _failure(work: Callable[[], str | None]) -> str | None:
    """Return why a way does not work, whether it was measured or the model raised."""
    try:
        return work()
    except ModelError as error:
        return f"is not fit for packed attention: {str(error).rstrip('.')}"
    except _RAISED as error:
        return f"does not run on packed rows ({type(error).__name__}: {reason_of(error)})"


def _by_layers(model: Any, report: ModelReport, probe: Probe) -> str | None:
    """Pack attention, hand boundaries to the mixers that keep them, run the other mixers on rectangles."""
    body = body_of(model)
    attention: list[tuple[nn.Module, Needs]] = []
    with recorded(attention, alone=True):
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
        *attention_lines(attention),
        *mixer_lines(mixers.keys() - loose.keys(), mixers, "take the boundaries themselves"),
        *mixer_lines(loose.keys(), loose, "run segment by segment, on rectangles" + faster(loose, why)),
    ]
    return _measure(model, report, probe)


def _loose(
    mixers: dict[str, nn.Module], short: dict[nn.Module, Call], long: dict[nn.Module, Call], probe: Probe
) -> tuple[dict[str, nn.Module], str | None]:
    """Return the mixers that do not keep segments apart when they are handed the boundaries, and what they said."""
    packed: dict[nn.Module, Call] = {}
    probe.hand_over = True
    try:
        loose: dict[str, nn.Module] = {}
        for training in (False, True):  # fused kernels often serve one of the two only
            with recorded_calls(probe.model, packed), mode(probe.model, training):
                probe.packed(probe.first, probe.lengths)
                loose |= {
                    name: module
                    for name, module in mixers.items()
                    if leaks(module, packed[module], short[module], long[module], probe.tokens, probe.lengths[0])
                }
    except _RAISED as error:
        return mixers, reason_of(error)
    return loose, None


def _as_a_whole(model: Any, report: ModelReport, probe: Probe) -> str | None:
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


def _measure(model: Any, report: ModelReport, probe: Probe) -> str | None:
    """Fill the report's measurements; return the reason to refuse the model, if any."""
    calls: list[tuple[nn.Module, Needs]] = []
    lengths = probe.lengths
    with recorded(calls):
        packed = probe.packed(probe.first, lengths)
    report.attention_calls = len(calls)
    report.needs = list(dict.fromkeys(needs for _, needs in calls))
    report.control = difference(probe.packed(probe.first, [sum(lengths)]), packed)
    scale = report.control or float("inf")
    report.leak = difference(probe.packed(probe.other, lengths), packed) / scale
    report.parity = difference(probe.alone(), packed) / scale
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
        padded = difference(probe.packed(probe.first, lengths), packed) / scale
        report.unflattening.slack = 0
        if not padded <= tolerance:
            return f"computes something else where rows are padded (off by {padded:.1e} of a full leak)"
    return _measure_training(model, probe, tolerance)


def _measure_training(model: Any, probe: Probe, tolerance: float) -> str | None:
    """Look for a leak in training mode, where attention dropout raises and other kernels may run."""
    results = []
    for first, lengths in ((probe.first, probe.lengths), (probe.other, probe.lengths), (probe.first, None)):
        with torch.random.fork_rng(devices=[probe.device] if probe.device.type == "cuda" else []):
            torch.manual_seed(0)  # dropout falls on the same places
            model.train()
            results.append(probe.packed(first, lengths or [sum(probe.lengths)]))
    model.eval()
    leak = difference(results[1], results[0]) / (difference(results[2], results[0]) or float("inf"))
    if not leak <= tolerance:
        return f"lets a document see the one before it in training (its outputs move by {leak:.1e} of a full leak)"
    return None


def _is_exact(model: nn.Module) -> bool:
    """Return whether the model computes in fp32 rather than in bf16, fp16 or TF32."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    narrow = weight.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return weight.dtype in (torch.float32, torch.float64) and not narrow


def _windows(config: Any) -> list[int]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return [window] if isinstance(window, int) and (not types or "sliding_attention" in types) else []
