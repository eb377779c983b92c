"""One model for each way of packing and each kind of layer: a packed row trains it as its documents would alone.

Alone means one document in a forward of its own under native eager attention; see `test_packed_equals_alone.py`.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainer.model.loading import LoadedModel, checkpoint_activations, load_model
from trainer.model.loss import PackedLM
from trainer.model.probe import set_attention
from trainer.model.rectangles import plan_rectangles

LENGTHS = [1, 23, 2, 64, 17, 5, 40, 33]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAYERS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {
    "model_type": "llama4_text", **SIZES, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 16,
    "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
ATTENTION = "attention"
MIXERS = "mixers"
WHOLE = "whole"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "soft-caps": (ATTENTION, {"model_type": "gemma2", **SIZES, **LAYERS, "attn_logit_softcapping": 2.0}),
    "sinks": (ATTENTION, {"model_type": "gpt_oss", **SIZES, **EXPERTS, **LAYERS}),
    "chunks": (ATTENTION, {**CHUNKS, "no_rope_layers": [1, 1]}),
    "two widths": (
        ATTENTION,
        {
            "model_type": "gemma4_text", **SIZES, **LAYERS, "global_head_dim": 320, "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
        },
    ),
    "state space": (
        MIXERS,
        {"model_type": "mamba2", **SIZES, "state_size": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 16},
    ),
    "token shift": (MIXERS, {"model_type": "rwkv", **SIZES, "context_length": 64}),
    "convolution": (MIXERS, {"model_type": "lfm2", **SIZES, "layer_types": ["conv", "full_attention"]}),
    "linear attention": (
        MIXERS,
        {
            "model_type": "qwen3_next", **SIZES, **EXPERTS, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "linear biases": (WHOLE, {"model_type": "bloom", **SIZES, "hidden_dropout": 0.0}),
    "scale by position": (WHOLE, {**CHUNKS, "no_rope_layers": [1, 0], "floor_scale": 8}),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(MODELS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    way, config = MODELS[request.param]
    path: Path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(config))
    torch.manual_seed(0)
    loaded = load_model(str(path))
    wrapped = loaded.report.unflattening.modules
    assert way == (WHOLE if "the body" in wrapped else MIXERS if wrapped else ATTENTION)
    with torch.no_grad():
        for module in loaded.model.modules():
            if isinstance(module, torch.nn.Linear):  # fresh weights are so small that mixing hardly matters
                module.weight.mul_(3)
    return loaded


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 97, (n,), generator=generator) for n in LENGTHS]
    offsets = torch.tensor([0, *LENGTHS, 0]).cumsum(0).to(torch.int32)  # one empty segment, as padding leaves it
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "shift_labels": torch.cat([torch.cat([ids[1:], torch.tensor([-100])]) for ids in documents])[None],
        "cu_seqlens": offsets,
        "max_seqlen": max(LENGTHS),
        "rectangles": plan_rectangles(offsets.numpy()),
    }


def losses_alone(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    before, losses = model.config._attn_implementation, []
    set_attention(model, "eager")
    for a, b in itertools.pairwise(batch["cu_seqlens"].tolist()):
        if a < b:
            logits = model(input_ids=batch["input_ids"][:, a:b], use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits, batch["shift_labels"][0, a:b], ignore_index=-100, reduction="none"))
    set_attention(model, before)
    return torch.cat(losses)


def packed_losses(loaded: LoadedModel, batch: dict[str, Any]) -> torch.Tensor:
    logits = loaded.model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], cu_seq_lens_q=batch["cu_seqlens"],
        max_length_q=batch["max_seqlen"], use_cache=False,
    ).logits[0]  # fmt: skip
    return F.cross_entropy(logits, batch["shift_labels"][0], ignore_index=-100, reduction="none")


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert max(grad.abs().max().item() for grad in right.values()) > 1
    for name, grad in right.items():
        largest = grad.abs().max().item()
        assert (left[name] - grad).abs().max().item() <= 2e-5 * largest + 5e-6, (name, largest)


def packed_lm(loaded: LoadedModel) -> PackedLM:
    return PackedLM(loaded.model, backend=loaded.backend, plain_head=loaded.report.plain_head)


def test_every_token_has_the_loss_it_has_alone(loaded: LoadedModel, batch: dict[str, Any]) -> None:
    alone = losses_alone(loaded.model, batch)
    assert int((alone > 0.1).sum()) > 100
    torch.testing.assert_close(packed_losses(loaded, batch), alone, rtol=2e-5, atol=2e-5)


def test_all_gradients_are_those_of_the_documents_alone(loaded: LoadedModel, batch: dict[str, Any]) -> None:
    model = loaded.model
    expected = gradients(model, losses_alone(model, batch).sum())
    assert_equal_gradients(gradients(model, packed_lm(loaded)(batch)), expected)
    unplanned = {key: value for key, value in batch.items() if key != "rectangles"}
    assert_equal_gradients(gradients(model, packed_lm(loaded)(unplanned)), expected)


def test_a_wrong_boundary_would_show(loaded: LoadedModel, batch: dict[str, Any]) -> None:
    merged = {**batch, "cu_seqlens": torch.tensor([0, sum(LENGTHS)], dtype=torch.int32), "max_seqlen": sum(LENGTHS)}
    difference = (packed_losses(loaded, merged) - losses_alone(loaded.model, batch)).abs().max()
    assert difference.item() > 0.01


def test_recomputing_activations_changes_no_gradient(loaded: LoadedModel, batch: dict[str, Any]) -> None:
    if not loaded.model.supports_gradient_checkpointing:
        pytest.skip("the family has no gradient checkpointing")
    expected = gradients(loaded.model, packed_lm(loaded)(batch))
    checkpoint_activations(loaded.model)
    assert_equal_gradients(gradients(loaded.model, packed_lm(loaded)(batch)), expected)
