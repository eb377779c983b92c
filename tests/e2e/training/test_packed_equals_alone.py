"""The promise of the trainer: a packed row trains a model exactly as its documents would, each run by itself.

Alone means one document in a forward of the stock model under its native eager attention, with cross-entropy by the
textbook; packed means all of them in one row through `PackedLM`. Compared are losses of every token and all gradients.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainer.model.loading import checkpoint_activations, load_model
from trainer.model.loss import PackedLM

LENGTHS = [1, 23, 2, 64, 17, 5, 40, 33]  # more than a window of 16, and documents too short for a target
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "gpt2": {"model_type": "gpt2", **GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0},  # attn_pdrop stays at its 0.1
    "qwen3": {"model_type": "qwen3", **SIZES},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 16},
    "gemma3": {"model_type": "gemma3_text", **SIZES, "sliding_window": 16, "layer_types": LAYERS},
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(MODELS[request.param]))
    torch.manual_seed(0)
    loaded = load_model(str(path))
    assert (loaded.backend, loaded.report.plain_head) == ("cpu", True)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.dim() > 1:  # fresh weights are so small that attention hardly matters
                parameter.mul_(3)
    return loaded.model


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 97, (n,), generator=generator) for n in LENGTHS]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    labels = torch.cat([torch.cat([ids[1:], torch.tensor([-100])]) for ids in documents])
    labels[50:60] = -100  # part of a prompt
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "shift_labels": labels[None],
        "cu_seqlens": torch.cat([offsets, offsets[-1:]]).to(torch.int32),  # one empty segment, as padding leaves it
        "max_seqlen": max(LENGTHS),
    }


def documents_of(batch: dict[str, Any]) -> Iterator[slice]:
    cu = batch["cu_seqlens"].tolist()
    return (slice(a, b) for a, b in itertools.pairwise(cu) if a < b)


def losses_alone(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Loss of every token, each document in a forward of its own, native attention."""
    model.set_attn_implementation("eager")
    losses = []
    for part in documents_of(batch):
        logits = model(input_ids=batch["input_ids"][:, part], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits, batch["shift_labels"][0, part], ignore_index=-100, reduction="none"))
    model.set_attn_implementation("packrow")
    return torch.cat(losses)


def gradients(model: Any, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(model.parameters()))
    return grads


def assert_equal_gradients(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert max(grad.abs().max().item() for grad in right.values()) > 1
    for name, grad in right.items():
        # Sums in another order: off by a few units in the last place of the largest terms.
        largest = grad.abs().max().item()
        assert (left[name] - grad).abs().max().item() <= 5e-6 * largest + 1e-6, (name, largest)


def packed_losses(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        cu_seq_lens_q=batch["cu_seqlens"],
        max_length_q=batch["max_seqlen"],
        use_cache=False,
    ).logits[0]
    return F.cross_entropy(logits, batch["shift_labels"][0], ignore_index=-100, reduction="none")


def test_every_token_has_the_loss_it_has_alone(model: Any, batch: dict[str, Any]) -> None:
    alone = losses_alone(model, batch)
    assert int((alone > 0.1).sum()) > 100
    torch.testing.assert_close(packed_losses(model, batch), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1 << 20, 40], ids=["one chunk", "chunks of 40"])
def test_the_chunked_loss_has_the_gradients_of_the_documents_alone(
    model: Any, batch: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.model.loss._chunk_rows", lambda *args: rows)
    packed = PackedLM(model, backend="cpu", plain_head=True)
    alone = losses_alone(model, batch)
    torch.testing.assert_close(packed(batch), alone.sum(), rtol=1e-5, atol=1e-5)
    assert_equal_gradients(
        gradients(model, lambda: packed(batch)), gradients(model, lambda: losses_alone(model, batch).sum())
    )


def test_a_rectangle_of_right_padded_rows_equals_the_documents_alone(model: Any, batch: dict[str, Any]) -> None:
    width = max(LENGTHS)
    ids, labels = torch.zeros(len(LENGTHS), width, dtype=torch.int64), torch.full((len(LENGTHS), width), -100)
    for row, part in enumerate(documents_of(batch)):
        ids[row, : part.stop - part.start] = batch["input_ids"][0, part]
        labels[row, : part.stop - part.start] = batch["shift_labels"][0, part]
    rectangle = {
        "input_ids": ids, "position_ids": torch.arange(width).expand_as(ids), "shift_labels": labels,
        "cu_seqlens": torch.arange(0, ids.numel() + 1, width, dtype=torch.int32), "max_seqlen": width,
    }  # fmt: skip
    expected = losses_alone(model, batch).sum()
    torch.testing.assert_close(
        PackedLM(model, backend="cpu", plain_head=True)(rectangle), expected, rtol=1e-5, atol=1e-5
    )
    model.set_attn_implementation("sdpa")
    native = PackedLM(model, backend=None, plain_head=False)(rectangle)
    model.set_attn_implementation("packrow")
    torch.testing.assert_close(native, expected, rtol=1e-5, atol=1e-5)


def test_a_wrong_boundary_would_show(model: Any, batch: dict[str, Any]) -> None:
    merged = {**batch, "cu_seqlens": torch.tensor([0, sum(LENGTHS)], dtype=torch.int32), "max_seqlen": sum(LENGTHS)}
    difference = (packed_losses(model, merged) - losses_alone(model, batch)).abs().max()
    assert difference.item() > 0.05


def test_activation_checkpointing_changes_no_gradient(model: Any, batch: dict[str, Any]) -> None:
    packed = PackedLM(model, backend="cpu", plain_head=True)
    expected = gradients(model, lambda: packed(batch))
    checkpoint_activations(model)
    calls: list[str] = []
    attention = next(module for name, module in model.named_modules() if name.endswith("attn"))
    attention.register_forward_hook(lambda *args: calls.append("forward"))
    assert_equal_gradients(gradients(model, lambda: packed(batch)), expected)
    assert len(calls) == 2  # once more in backward


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_on_a_gpu_a_packed_row_in_bf16_loses_what_its_documents_lose_alone_in_fp32(
    name: str, batch: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[name]))
    loaded = load_model(str(path), device="cuda", compute_dtype=torch.bfloat16)
    assert loaded.backend != "cpu"
    moved = {key: value.cuda() if torch.is_tensor(value) else value for key, value in batch.items()}
    packed = PackedLM(loaded.model, backend=loaded.backend, plain_head=loaded.report.plain_head)
    with torch.autocast("cuda", torch.bfloat16):
        ours = packed(moved)
    alone = losses_alone(loaded.model, moved).sum()
    assert abs(ours.item() / alone.item() - 1) < 1e-2
