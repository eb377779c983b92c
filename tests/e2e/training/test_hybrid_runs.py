"""Runs of models whose layers are unlike: evaluation, resuming, export, LoRA and compiled layers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from shards import Dataset
from trainer import TrainConfig, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # of torch, when dynamo is loaded
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo looks at it
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),  # peft, of experts
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft asks by the old name
]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "vocab_size": 4096, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixers on rectangles": {
        "model_type": "qwen3_next", **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "two widths": {
        "model_type": "gemma4_text", **SIZES, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 4096,
    },
    "body on rectangles": {"model_type": "bloom", **SIZES, "hidden_dropout": 0.0},
}  # fmt: skip


@pytest.fixture(params=sorted(MODELS))
def config(request: pytest.FixtureRequest, packed: str, tmp_path: Path) -> Any:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODELS[request.param] | {"vocab_size": Dataset(packed).max_token_id + 1}))

    def make(out: str, **fields: Any) -> TrainConfig:
        chosen = {
            "dataset": packed, "model": str(path), "steps": 4, "packs_per_step": 2, "tokens_per_batch": 256,
            "lr": 1e-2, "dtype": "fp32", "device": "cpu", "progress": False,
        }  # fmt: skip
        return TrainConfig(out=str(tmp_path / out), **chosen | fields)

    return make


def loss_alone(model: Any, packed: str) -> float:
    """Mean loss of a target, every document by itself, by transformers' own attention and loss."""
    total, targets = 0.0, 0
    with torch.no_grad():
        for row in Dataset(packed):
            for start, stop in zip(row["cu_seqlens"][:-1], row["cu_seqlens"][1:], strict=True):
                ids = torch.from_numpy(row["input_ids"][start:stop].astype("int64"))
                labels = ids.where(torch.from_numpy(row["loss_mask"][start:stop].astype(bool)), -100)
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
                total += float(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum"))
                targets += int((labels[1:] != -100).sum())
    return total / targets


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_run_is_evaluated_exported_and_resumed_as_any_other(config: Any, packed: str, tmp_path: Path) -> None:
    whole = train(config("whole", eval=packed))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert whole.eval_loss == pytest.approx(loss_alone(model.eval(), packed), rel=1e-4)
    train(config("parts", save_every=2))
    last = sorted((tmp_path / "parts" / "checkpoints").glob("step-*"))[-1]
    assert last.name.endswith("4")
    shutil.rmtree(last)  # as if it had died after step 2
    shutil.rmtree(tmp_path / "parts" / "model")
    train(config("parts", save_every=2, resume=True))
    expected, resumed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(value, resumed[name]) for name, value in expected.items())


def test_adapters_are_trained_and_loaded_beside_the_model(config: Any, packed: str, tmp_path: Path) -> None:
    settings = config("adapters", lora_rank=2)
    fields = json.loads(Path(settings.model).read_text())
    train(config("base", steps=1, lr=1e-6))
    settings = config("adapters", lora_rank=2, model=str(tmp_path / "base" / "model"), eval=packed, lora_targets=())
    result = train(settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base" / "model")
    assert base.config.get_text_config().model_type == fields["model_type"]
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters" / "adapter").eval()
    assert result.eval_loss == pytest.approx(loss_alone(adapted, packed), rel=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo meets an old autograd function in BLOOM
def test_compiled_layers_lose_what_plain_ones_lose(config: Any) -> None:
    plain, compiled = train(config("plain", steps=2)), train(config("compiled", steps=2, compile=True))
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-4)
