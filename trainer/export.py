"""A trained model as transformers knows it: safetensors, tokenizer, chat template and a card; no shardpack needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shards import Dataset
from trainer.config import TrainConfig
from trainer.distributed import World


def export(model: Any, out: Path, dataset: Dataset, config: TrainConfig, world: World, figures: dict[str, Any]) -> Path:
    """Write the model; every process calls this, since a sharded model is gathered.

    Args:
        model: The transformers model, with adapters or not; a bf16 run's is cast to bf16 and adapters are merged in
            place, so that training cannot go on with it.
        out: Run directory; gets `model`, and `adapter` for LoRA.
        figures: What the card reports.

    Returns:
        The directory that `AutoModelForCausalLM.from_pretrained` loads: `model`, or `adapter` where a
        sharded base cannot take the adapters in.
    """
    target, adapters = out / "model", hasattr(model, "get_base_model")
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    dtype = torch.float32 if config.dtype == "fp32" else torch.bfloat16
    state = _gathered(model, dtype, world.is_main) if sharded else None
    if not world.is_main:
        return out / "adapter" if adapters and sharded else target
    if adapters:
        model.save_pretrained(out / "adapter", state_dict=state)
        _add_companions(out / "adapter", dataset, config, figures)
        if sharded:
            return out / "adapter"
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
    return target


def _gathered(model: Any, dtype: torch.dtype, keep: bool) -> dict[str, torch.Tensor]:
    """Collect every whole tensor in host memory of one process; tied names stay one tensor."""
    whole: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in whole:
            full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            whole[id(tensor)] = full.to(dtype).cpu() if keep else full.new_empty(0)
        state[name] = whole[id(tensor)]
    return state


def _add_companions(target: Path, dataset: Dataset, config: TrainConfig, figures: dict[str, Any]) -> None:
    for file in sorted((dataset.path / "tokenizer").glob("*")):
        if file.is_file() and file.name not in ("config.json", "README.md"):
            shutil.copyfile(file, target / file.name)
    (target / "README.md").write_text(_card(dataset, config, figures), encoding="utf-8")


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
