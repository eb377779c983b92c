"""The chunked losses against cross-entropy by the textbook, and what a step's loss must not depend on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shards.errors import ModelError
from trainer.model import loss as loss_module
from trainer.model.loading import load_model
from trainer.model.loss import PackedLM, chunked_cross_entropy, document_weights, linear_cross_entropy

VOCAB, WIDTH, TOKENS = 31, 8, 50
LABELS = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
LABELS[::7] = -100
Loss = Callable[..., Tensor]


@pytest.fixture(params=[1, 8, 1 << 20], ids=lambda rows: f"chunks of {rows}")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_chunk_rows", lambda *args: request.param)


def textbook(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None = None, z: float = 0.0
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    total = logits.new_zeros(())
    for row in range(len(labels)):
        if labels[row] != -100:
            lse = logits[row].exp().sum().log()
            token = lse - logits[row, labels[row]] + z * lse**2
            total = total + token * (1 if weights is None else weights[row])
    return total


def by_module(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None = None, z: float = 0.0
) -> Tensor:
    return chunked_cross_entropy(lambda chunk: F.linear(chunk, weight, bias), hidden, VOCAB, labels, weights, z)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("chunked", [linear_cross_entropy, by_module])
@pytest.mark.parametrize("z", [0.0, 0.01])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_gradients_are_those_of_the_textbook(chunked: Loss, z: float, weighted: bool) -> None:
    inputs = leaves((TOKENS, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    weights = torch.linspace(0, 2, TOKENS) if weighted else None
    ours, expected = chunked(*inputs, LABELS, weights, z) / 7, textbook(*inputs, LABELS, weights, z) / 7
    torch.testing.assert_close(ours, expected)
    for left, right in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_right_one(frozen: str) -> None:
    hidden, weight = leaves((TOKENS, WIDTH), (VOCAB, WIDTH))
    learning = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    (ours,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, None, LABELS), [learning])
    (expected,) = torch.autograd.grad(textbook(hidden, weight, None, LABELS), [learning])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunked", [linear_cross_entropy, by_module])
def test_a_row_without_targets_costs_nothing_and_has_gradients_of_zero(chunked: Loss) -> None:
    inputs = leaves((TOKENS, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    total = chunked(*inputs, torch.full((TOKENS,), -100))
    assert total.item() == 0
    assert all(grad.abs().max().item() == 0 for grad in torch.autograd.grad(total, inputs))


def test_without_gradients_none_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_add_product", lambda *args: pytest.fail("made a gradient of the weight"))
    inputs = leaves((TOKENS, WIDTH), (VOCAB, WIDTH))
    with torch.no_grad():
        ours = linear_cross_entropy(*inputs, None, LABELS)
    torch.testing.assert_close(ours, textbook(*inputs, None, LABELS).detach())


def test_under_autocast_products_run_in_bf16_and_gradients_arrive_in_fp32() -> None:
    hidden, weight = leaves((TOKENS, WIDTH), (VOCAB, WIDTH))
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, None, LABELS)
    expected = textbook(hidden.bfloat16().float(), weight.bfloat16().float(), None, LABELS)
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=0)
    assert not torch.equal(ours, textbook(hidden, weight, None, LABELS))
    grads = torch.autograd.grad(ours, [hidden, weight])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]


def test_bf16_gradients_are_summed_in_fp32_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_chunk_rows", lambda *args: 1)
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in leaves((2000, 4), (3, 4)))
    labels = torch.zeros(2000, dtype=torch.int64)
    (ours,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, None, labels), [weight])
    (exact,) = torch.autograd.grad(textbook(hidden.double(), weight.double(), None, labels), [weight])
    assert ours.dtype == torch.bfloat16
    assert ((ours - exact).abs().max() / exact.abs().max()).item() < 2**-7


def test_documents_with_6_and_3_targets_weigh_a_sixth_and_a_third() -> None:
    labels = torch.tensor([5, 5, 5, 5, 5, 5, -100, 7, -100, 7, 7, -100, -100])
    cu = torch.tensor([0, 7, 12, 13, 13], dtype=torch.int32)  # one document without a target, one empty segment
    weights = document_weights(labels, cu)
    assert weights[:6].tolist() == pytest.approx([1 / 6] * 6)
    assert weights[[7, 9, 10]].tolist() == pytest.approx([1 / 3] * 3)
    assert torch.isfinite(weights).all()


@pytest.fixture
def packed(model_config: Callable[..., str]) -> PackedLM:
    torch.manual_seed(0)
    return PackedLM(load_model(model_config()).model, backend="cpu", plain_head=True)


def row(documents: list[Tensor]) -> dict[str, Any]:
    lengths = [len(ids) for ids in documents]
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "shift_labels": torch.cat([torch.cat([ids[1:], torch.tensor([-100])]) for ids in documents])[None],
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_seqlen": max(lengths),
    }


def random_documents(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 97, (length,), generator=generator) for length in range(2, 2 + number)]


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_a_step_has_one_loss_and_gradient_however_it_is_split(packed: PackedLM, weighting: str) -> None:
    documents = random_documents(12)
    packed.weighting = weighting
    divisor = float(sum(len(ids) - 1 for ids in documents)) if weighting == "token" else 12.0

    def step(size: int) -> list[Tensor]:
        packed.zero_grad()
        total = torch.zeros(())
        for start in range(0, 12, size):
            part = packed(row(documents[start : start + size]), divisor)
            part.backward()
            total += part.detach()
        return [total, *(p.grad.clone() for p in packed.parameters() if p.grad is not None)]

    whole = step(12)
    assert len(whole) > 10
    for size in (1, 4, 6):
        for left, right in zip(step(size), whole, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_weighting_by_document_is_the_mean_of_document_means(packed: PackedLM) -> None:
    documents = random_documents(5)
    means = [packed(row([ids]), len(ids) - 1.0).item() for ids in documents]
    packed.weighting = "document"
    assert packed(row(documents), 5.0).item() == pytest.approx(sum(means) / 5, rel=1e-5)


def test_z_loss_is_added_in_training_and_left_out_of_evaluation(packed: PackedLM) -> None:
    batch = row(random_documents(3))
    plain = packed(batch).item()
    packed.z_loss = 0.1
    assert packed.train()(batch).item() > plain + 1
    assert packed.eval()(batch).item() == pytest.approx(plain)


def test_all_heads_give_one_loss(packed: PackedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_chunk_rows", lambda *args: 5)
    batch = row(random_documents(6))
    expected = packed(batch)
    expected.backward()
    grads = [p.grad.clone() for p in packed.parameters()]
    packed.zero_grad()

    class Wrapped(nn.Linear):
        """As adapters and shards wrap a head: no longer exactly nn.Linear."""

    packed.model.lm_head.__class__ = Wrapped
    for plain_head in (True, False):
        packed.plain_head = plain_head
        loss = packed(batch)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        for left, right in zip(packed.parameters(), grads, strict=True):
            torch.testing.assert_close(left.grad, right, rtol=1e-4, atol=1e-6)
        packed.zero_grad()


def test_no_more_logits_are_made_at_once_than_a_chunk_holds(packed: PackedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_chunk_rows", lambda *args: 5)
    sizes: list[int] = []
    real = F.linear

    def spy(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(weight) == 97:
            sizes.append(inputs.numel() // inputs.shape[-1])
        return real(inputs, weight, bias)

    monkeypatch.setattr(F, "linear", spy)
    packed(row(random_documents(6))).backward()
    assert sum(sizes) == sum(range(2, 8))
    assert max(sizes) == 5


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks by the old name
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["frozen head", "adapted head"])
def test_adapters_learn_as_under_the_models_own_forward(packed: PackedLM, targets: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    batch = row(random_documents(4))
    torch.manual_seed(1)
    model = get_peft_model(packed.model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    learning = [p for p in model.parameters() if p.requires_grad]
    packed = PackedLM(model, backend="cpu", plain_head=True)
    ours = torch.autograd.grad(packed(batch), learning)
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False,
        cu_seq_lens_q=batch["cu_seqlens"], max_length_q=batch["max_seqlen"],
    ).logits[0]  # fmt: skip
    expected = F.cross_entropy(logits, batch["shift_labels"][0], ignore_index=-100, reduction="sum")
    torch.testing.assert_close(packed(batch), expected)
    assert len(ours) == 2 * (2 + len(targets) - 1)
    for left, right in zip(ours, torch.autograd.grad(expected, learning), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_native_attention_refuses_packed_rows(packed: PackedLM) -> None:
    packed.backend = None
    with pytest.raises(ModelError, match="3 segments in 1 rows would see each other"):
        packed(row(random_documents(3)))


def test_ligers_loss_is_refused_where_it_would_be_wrong(packed: PackedLM) -> None:
    with pytest.raises(ModelError, match="this head is scaled or soft-capped"):
        PackedLM(packed.model, backend="cpu", plain_head=False, liger="on")
    with pytest.raises(ModelError, match="weighting is by document"):
        PackedLM(packed.model, backend="cpu", plain_head=True, weighting="document", liger="on")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_ligers_loss_is_ours() -> None:
    pytest.importorskip("liger_kernel")
    from trainer.model.liger import fused_cross_entropy

    inputs = [x.detach().cuda().requires_grad_() for x in leaves((TOKENS, WIDTH), (VOCAB, WIDTH))]
    for labels in (LABELS.cuda(), torch.full((TOKENS,), -100).cuda()):
        ours = linear_cross_entropy(*inputs, None, labels, None, 0.01) / 7
        ligers = fused_cross_entropy(*inputs, None, labels, 0.01) / 7
        torch.testing.assert_close(ligers, ours)
        for left, right in zip(torch.autograd.grad(ligers, inputs), torch.autograd.grad(ours, inputs), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)
