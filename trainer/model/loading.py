"""A model by name, directory or configuration -> a model ready for packed rows, and what was found out about it.

Nothing about a model changes in silence: attention dropout set to 0 is noted, weights missing from a checkpoint and ids
beyond the vocabulary are errors, embeddings are never resized.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shards.errors import ModelError, reason_of
from shards.quiet import quiet
from trainer.model.attention import IMPLEMENTATION, register
from trainer.model.backends.choice import pick_backends
from trainer.model.backends.interface import Backends, Needs
from trainer.model.experts import follow_autocast
from trainer.model.isolation import inspect_model, refusal
from trainer.model.liger import IN_PLACE, put_in, replace_layers
from trainer.model.probe import position_limit, sees_ahead
from trainer.model.report import ModelReport

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
_WEIGHTS = ("*.safetensors*", "*.bin*")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model and how to run it."""

    model: Any
    "A causal language model of transformers, on its device, in training mode."
    backend: Backends | None
    "Key of `ATTENTION_BACKENDS`, or one by kind of head; None for native attention, which takes rectangles only."
    report: ModelReport
    needs: Sequence[Needs] = ()
    "What its attention layers ask of a backend, on its device and in the type of the run."
    notes: list[str]
    "What a person should know, one line each."


def load_config(name: str) -> Any:
    """Return the configuration behind a hub name, a model directory or a configuration's JSON file.

    Code that a model brings along is never run.

    Raises:
        ModelError: There is none, transformers does not know its model type, or its weights are quantized.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError, StrictDataclassError
    from transformers import AutoConfig

    path = Path(name)
    local = path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2 or path.suffix == ".json"
    if local and not path.exists():  # else taken for a name on the hub
        raise ModelError(f"{name}: no such file or directory; expected a model. Check the path.")
    try:
        if path.suffix == ".json":
            fields = json.loads(path.read_text())
            if not isinstance(fields, dict) or "model_type" not in fields:
                raise ModelError(f"{name}: no model_type; expected the configuration of a transformers model. Add one.")
            return _unquantized(name, AutoConfig.for_model(**fields))
        with quiet():
            return _unquantized(name, AutoConfig.from_pretrained(name, trust_remote_code=False))
    except StrictDataclassError as error:  # the first line names transformers' validator, the last one the fault
        fault = str(error).strip().splitlines()[-1].strip().rstrip(".")
        raise ModelError(f"{name}: not a valid model configuration: {fault}. Fix it.") from error
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            raise ModelError(
                f"{name}: no such directory, and the hub cannot be reached. Check the path, or the network."
            ) from error
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name}: brings code of its own (auto_map), which is never run here; expected a model that "
                "transformers knows. Use another model."
            ) from error
        raise ModelError(f"{name}: cannot read a model configuration: {_first_line(error)}. Check the name.") from error


def _unquantized(name: str, config: Any) -> Any:
    """Return the configuration, unless its weights are of a kind that cannot learn."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return config
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    raise ModelError(
        f"{name}: its weights are quantized ({fields.get('quant_method', 'quantization_config')}), and these are "
        "not trained here; expected bf16, fp16 or fp32 weights. Use the checkpoint that it was made from."
    )


def _first_line(error: BaseException) -> str:
    return reason_of(error).partition(" Should contain one of ")[0].rstrip(".")  # it lists every model type there is


def _without_attention_dropout(config: Any) -> list[str]:
    notes = []
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key in _DROPOUTS:
            if value := getattr(part, key, 0.0):
                setattr(part, key, 0.0)
                notes.append(f"attention dropout {value} ({key}) is set to 0: variable-length kernels have none")
    return notes


def _build(name: str, config: Any, dtype: torch.dtype, device: torch.device, attention: str, *, random: bool) -> Any:
    """Return the model, with random weights or with its own.

    One that looks its attention up in a table of its own (GPT-Neo) has no place for `packrow` and gets its plain one.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        if random:
            with device:
                return auto.from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=False)
        with quiet():
            model, info = auto.from_pretrained(
                name, config=config, dtype=dtype, attn_implementation=attention, output_loading_info=True,
                trust_remote_code=False,
            )  # fmt: skip
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            return _build(name, config, dtype, device, "eager", random=random)
        if Path(name).is_dir() and not any(found for kind in _WEIGHTS for found in Path(name).glob(kind)):
            raise ModelError(
                f"{name}: holds no weights; expected model.safetensors. "
                f"Use a complete model, or {Path(name) / 'config.json'} to start from random weights."
            ) from error
        raise ModelError(
            f"{name}: cannot load a causal model: {_first_line(error)}. Check the name, and its files."
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{name}: {len(missing)} weights are not in the checkpoint and would start random, first {missing[0]}; "
            "expected all. Use a complete checkpoint, or the path of its config.json to start from random weights."
        )
    return model.to(device)


def load_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    attention: str = "auto",
    liger: str = "auto",
    device: torch.device | str = "cpu",
    packed: bool = True,
    host: bool = False,
) -> LoadedModel:
    """Load a causal language model, prove it safe on packed rows, and choose its attention backend.

    Args:
        name: Hub name, directory, or a configuration's JSON file (random weights, from the current random state).
        dtype: Type of the weights.
        compute_dtype: Type in which attention will run, where autocast makes it differ from `dtype`.
        attention: `auto` or a key of `ATTENTION_BACKENDS`.
        liger: `auto`, `on` or `off`: liger's layers in place of the model's own, on a GPU.
        packed: Whether rows hold several documents. If not, a model refused for packed rows is loaded with its native
            attention, which is right for rectangles of right-padded rows.
        host: Leave the weights in host memory, for whoever moves them to the device part by part; all else is chosen
            for `device`.

    Raises:
        ModelError: The model cannot be loaded, is not safe on packed rows, or the backend cannot serve it.
    """
    register()
    follow_autocast()
    device, random = torch.device(device), Path(name).suffix == ".json"
    place = torch.device("cpu") if host else device
    config = load_config(name)
    reason = refusal(config)
    report = ModelReport(name=name, model_type=config.model_type, reason=reason)
    if reason is None:
        notes = _without_attention_dropout(config)
        model = _build(name, config, dtype, place, IMPLEMENTATION, random=random)
        if not host:
            notes += replace_layers(model, liger, device, random=random)
        report = inspect_model(model, name, random=random)
        if host:  # after the probe: these layers run on the device alone
            notes += _replace_layers_on_host(model, name, liger, device, dtype)
    if report.accepted:
        needs = [replace(each, dtype=compute_dtype or dtype, device=device) for each in report.needs]
        backend, lines = pick_backends(attention, needs, prove=True)
        return LoadedModel(
            model=model.train(),
            backend=backend,
            report=report,
            needs=needs,
            notes=[*report.ways, *notes, *lines, *report.notes],
        )
    if packed:
        causal = not getattr(config.get_text_config(), "is_encoder_decoder", False)  # no dataset helps those
        advice = "Use another model" + (", or if it is causal, a bucketed dataset." if causal else ".")
        raise ModelError(f"{name} ({report.model_type}): the model {report.reason}. {advice}")
    model = _build(name, load_config(name), dtype, place, "eager", random=random)
    if sees_ahead(model):
        raise ModelError(
            f"{name} ({report.model_type}): its attention is not causal; expected a causal language model."
        )
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    report.vocab_size = model.get_input_embeddings().weight.shape[0]
    report.max_positions, report.position_limit = position_limit(model)
    note = f"rows hold one document each and run on native attention: the model {report.reason}"
    return LoadedModel(model=model.train(), backend=None, report=report, notes=[note])


def _replace_layers_on_host(model: Any, name: str, mode: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Put liger's layers into a model in host memory, if they are right in a small copy of it on the device.

    Returns:
        One line that says what was done.

    Raises:
        ModelError: As `replace_layers`.
    """
    if device.type != "cuda" or mode == "off":
        return replace_layers(model, mode, device)
    small = _build(name, _sampled(model.config), dtype, device, IMPLEMENTATION, random=True)
    lines = replace_layers(small, mode, device, random=True)
    if lines == [IN_PLACE]:
        put_in(model)
    return lines


def checkpoint_activations(model: Any) -> None:
    """Keep only the input of each layer in forward, and recompute the rest in backward."""
    # Renamed late in transformers 5; the old name warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _sampled(config: Any) -> Any:
    """Return the configuration with few layers, words and experts: isolation hangs on a layer's code, not on them."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    total, keep = text.num_hidden_layers, min(text.num_hidden_layers, 2)
    for value in vars(text).values():
        if isinstance(value, (list, tuple)) and len(value) == total and isinstance(value[0], (str, bool)):
            keep = max(keep, *(value.index(kind) + 1 for kind in value))  # every kind of layer is among the first
    if (getattr(text, "first_k_dense_replace", None) or 0) > 1:
        text.first_k_dense_replace = 1  # one dense layer, then experts
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(text, name, value[:keep])
    text.num_hidden_layers = keep
    text.vocab_size = min(text.vocab_size, 1024)
    for part in (config, text):
        part.pad_token_id, part.bos_token_id, part.eos_token_id = 0, 1, 2
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = 0  # they share with layers that are no longer there
    chosen, groups = getattr(text, "num_experts_per_tok", None) or 0, getattr(text, "n_group", None) or 1
    # routing in groups picks the best groups by their two best experts, then experts from these groups alone
    least = max(4, groups * max(2, -(-chosen // (getattr(text, "topk_group", None) or 1))) if groups > 1 else chosen)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if isinstance(count := getattr(text, name, None), int):
            setattr(text, name, min(count, least))
    return config


def check_model(name: str) -> ModelReport:
    """Report whether a model is safe to pack, and if not, why; see `ModelReport.text`.

    A copy with random weights and the first few layers is probed, so that no weights are loaded.

    Raises:
        ModelError: There is no such model.
    """
    register()
    config = load_config(name)
    if reason := refusal(config):
        return ModelReport(name=name, model_type=config.model_type, reason=reason)
    notes, small = _without_attention_dropout(config), _sampled(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(name, small, torch.float32, torch.device("cpu"), IMPLEMENTATION, random=True)
    report = inspect_model(model, name, random=True)
    text = config.get_text_config()
    report.vocab_size = text.vocab_size
    report.notes += [f"probed on the first {report.num_layers} of {text.num_hidden_layers} layers", *notes]
    return report


def check_segments(report: ModelReport, max_seqlen: int) -> list[str]:
    """Check that the model has a position for every token of the dataset's longest segment.

    Returns:
        Notes for a person.

    Raises:
        ModelError: The model has no position for the last tokens of that segment.
    """
    limit = report.max_positions
    if limit is None or max_seqlen <= limit:
        return []
    if report.position_limit is not None:
        raise ModelError(
            f"{report.name}: the longest segment has {max_seqlen} tokens; expected at most {limit} "
            f"({report.position_limit}). Build the dataset with --seq-len {limit} or less."
        )
    return [f"the longest segment has {max_seqlen} tokens; the model was made for {limit}"]


def check_vocabulary(report: ModelReport, max_token_id: int) -> None:
    """Check that a dataset's largest token id has an embedding; embeddings are never resized.

    Raises:
        ModelError: A token id has no embedding.
    """
    if max_token_id >= report.vocab_size:
        raise ModelError(
            f"{report.name}: token id {max_token_id} in the dataset, but only {report.vocab_size} embeddings in the "
            "model. Build the dataset with this model's tokenizer, or enlarge the embeddings and save the model first."
        )
