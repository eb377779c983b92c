"""A trained model as transformers knows it: safetensors, tokenizer, chat template and a card; no shardpack needed.

What is exported is what was trained: the end marks that answers were trained to end in stop generation, the chat
template is that of the rows, and weights that were tied before adapters moved one of them are no longer tied.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor

from shards import Dataset
from shards.errors import PackError, reason_of
from shards.quiet import quiet
from trainer.checks import TOKENIZER_FILES
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.model.loss import unwrap


def export(
    model: Any, out: Path, dataset: Dataset, config: TrainConfig, world: World, figures: dict[str, Any]
) -> tuple[Path, list[str]]:
    """Write the model; every process calls this, since a sharded model is gathered.

    Args:
        model: The transformers model, with adapters or not; a bf16 run's is cast to bf16 and adapters are merged in
            place, so that training cannot go on with it.
        out: Run directory; gets `model`, and `adapter` for LoRA.
        figures: What the card reports.

    Returns:
        The directory that `AutoModelForCausalLM.from_pretrained` loads: `model`, or `adapter` where a
        sharded base cannot take the adapters in. And what a person should know, one line each.

    Raises:
        PackError: The directory cannot be written.
    """
    try:
        with quiet():
            return _export(model, out, dataset, config, world, figures)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else reason_of(error)
        raise PackError(
            f"{out / 'model'}: cannot write the model ({reason}); expected room and the right to write. "
            "The checkpoints are intact: make room, then run again with `resume`."
        ) from error


def _export(
    model: Any, out: Path, dataset: Dataset, config: TrainConfig, world: World, figures: dict[str, Any]
) -> tuple[Path, list[str]]:
    target, adapters = out / "model", hasattr(model, "get_base_model")
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    dtype = torch.float32 if config.dtype == "fp32" else torch.bfloat16
    state = _gathered(model, None if adapters else dtype, world.is_main) if sharded else None
    if not world.is_main:
        return (out / "adapter" if adapters and sharded else target), []
    notes = [*add_end_marks(unwrap(model), trained_end_ids(dataset)), *drop_foreign_code(unwrap(model))]
    if adapters:
        # the base keeps its embeddings, whatever has adapters
        model.save_pretrained(out / "adapter", state_dict=state, save_embedding_layers=False)
        unwrap(model).generation_config.save_pretrained(out / "adapter")
        _add_companions(out / "adapter", dataset, config, figures)
        if sharded:
            return out / "adapter", notes
        notes += untie(model)
        model = model.merge_and_unload()
    if not sharded:
        model.to(dtype)
    model.save_pretrained(target, state_dict=state)
    if sharded:  # the model in memory has kept its type
        file = target / "config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}, indent=2)
        )
    _add_companions(target, dataset, config, figures)
    return target, notes


def drop_foreign_code(model: Any) -> list[str]:
    """Let a model's configuration name no code of its author's: it was never run, and is not beside the weights.

    Returns:
        One line, where it named any.
    """
    named = vars(model.config).pop("auto_map", None)
    if not named:
        return []
    return [
        "export: auto_map of the base model's configuration is left out, its code was not run (transformers' own was)"
    ]


def trained_end_ids(dataset: Dataset) -> list[int]:
    """Return the end marks that documents of a dataset are trained to end in, as its build found them."""
    ids = dataset.manifest["facts"].get("trained_end_ids", [])
    return [token for token in ids if type(token) is int and 0 <= token <= dataset.max_token_id]


def add_end_marks(model: Any, trained: list[int]) -> list[str]:
    """Let generation stop at the end marks that were trained, besides those at which it stopped before.

    Returns:
        One line, where any was missing.
    """
    before = model.generation_config.eos_token_id
    known = [] if before is None else [before] if isinstance(before, int) else list(before)
    added = [token for token in trained if token not in known]
    if not added:
        return []
    model.generation_config.eos_token_id = known + added
    stops, stopped = (", ".join(map(str, ids)) for ids in (added, known))
    before_this = f"it stopped at {stopped} before" if known else "nothing stopped it before"
    return [f"export: generation stops at id {stops} too, the end mark that was trained ({before_this})"]


def untie(model: Any) -> list[str]:
    """Give head and embedding weights of their own where adapters of one would be merged into both.

    Returns:
        One line, where that was needed.
    """
    base = unwrap(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    inner = [getattr(layer, "base_layer", layer) for layer in (embedding, head)]
    if head is None or inner[0].weight is not inner[1].weight or (inner[0] is embedding and inner[1] is head):
        return []
    inner[1].weight = nn.Parameter(inner[0].weight.detach().clone(), requires_grad=False)
    for settings in {id(each): each for each in (base.config, base.config.get_text_config())}.values():
        settings.tie_word_embeddings = False
    return ["export: head and embedding were tied and are no longer, since adapters moved one of them"]


def _gathered(model: Any, dtype: torch.dtype | None, keep: bool) -> dict[str, torch.Tensor]:
    """Collect every whole tensor in host memory of one process; tied names stay one tensor.

    Without a `dtype` only what was trained is collected, in the type that it was trained in: that is for adapters.
    """
    whole: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if dtype is None and not tensor.requires_grad:
            continue
        if id(tensor) not in whole:
            full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            whole[id(tensor)] = full.to(dtype or full.dtype).cpu() if keep else full.new_empty(0)
        state[name] = whole[id(tensor)]
    return state


def _add_companions(target: Path, dataset: Dataset, config: TrainConfig, figures: dict[str, Any]) -> None:
    """Put tokenizer, chat template and card beside the weights, and give all files the usual access rights."""
    for name in TOKENIZER_FILES:
        file = dataset.path / "tokenizer" / name
        if file.is_file():
            shutil.copyfile(file, target / name)
    card = target / "README.md"
    card.write_bytes(_card(dataset, config, figures).encode("utf-8", "replace"))  # a path may be no text
    for file in target.glob("*.safetensors"):
        file.chmod(card.stat().st_mode & 0o777)  # safetensors gives 600


def _card(dataset: Dataset, config: TrainConfig, figures: dict[str, Any]) -> str:
    base = "" if Path(config.model).exists() else f"base_model: {config.model}\n"
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    paths = ("dataset", "eval", "model", "out")  # of this machine; the dataset has its id
    settings = json.dumps({name: value for name, value in config.to_dict().items() if name not in paths}, indent=1)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{base}tags: [shardpack]\n---\n"
        f"# {Path(config.out).name}\n\nTrained on packed rows: every document saw only itself.\n\n"
        f"| | |\n|---|---|\n| dataset id | `{dataset.dataset_id}` |\n"
        f"| capacity of a row | {dataset.seq_len} tokens |\n{rows}\n\n"
        f"## Settings\n\n```json\n{settings}\n```\n"
    )
