"""Weights of targets: the loss is their weighted mean, and weights of 1 change no bit of it."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shards import Dataset
from trainer.batch import IGNORED
from trainer.collator import PackedCollator
from trainer.distributed import World
from trainer.evaluation import evaluate
from trainer.loader import PackLoader
from trainer.model.attention import BACKEND_KEYWORD
from trainer.model.loading import load_model
from trainer.model.loss import PackedLM


def random_weights(number: int) -> np.ndarray:
    return np.random.default_rng(5).choice([0.0, 0.25, 0.5, 1.0, 3.0], number)


@pytest.fixture
def datasets(make_dataset, documents) -> dict[str, Dataset]:
    main = {"main": documents(60, 40)}
    return {
        name: make_dataset(main, 48, name=name, weigh=weigh)
        for name, weigh in (("none", None), ("ones", np.ones), ("some", random_weights))
    }


@pytest.fixture
def module(model_config) -> PackedLM:
    torch.manual_seed(0)
    return PackedLM(load_model(model_config()).model, backend="cpu", plain_head=True)


def step_loss(module: PackedLM, dataset: Dataset, weighting: str = "token") -> torch.Tensor:
    """Return the loss of the first step, of several micro-batches."""
    loader = PackLoader(dataset, packs_per_step=4, weighting=weighting)
    module.weighting = weighting
    step = loader.step_at(0)
    with torch.no_grad():
        return sum(module(batch, step.divisor) for batch, _ in zip(loader, step.batches, strict=False))


def by_definition(module: PackedLM, dataset: Dataset, packs: np.ndarray, weighting: str) -> float:
    """Score each document alone, and divide the weighted sum of its token losses as the weighting says."""
    total = weights_seen = documents = 0.0
    for pack in (dataset[int(pack)] for pack in packs):
        for start, stop in zip(pack["cu_seqlens"][:-1], pack["cu_seqlens"][1:], strict=True):
            ids = torch.from_numpy(pack["input_ids"][start:stop].astype(np.int64))
            weights = torch.from_numpy(pack["loss_weights"][start:stop].astype(np.float64))[1:]
            if not weights.sum():
                continue
            with torch.no_grad():
                logits = module.model(
                    input_ids=ids[None], position_ids=torch.arange(len(ids))[None],
                    cu_seq_lens_q=torch.tensor([0, len(ids)], dtype=torch.int32),
                    cu_seq_lens_k=torch.tensor([0, len(ids)], dtype=torch.int32),
                    max_length_q=len(ids), max_length_k=len(ids), use_cache=False, **{BACKEND_KEYWORD: "cpu"},
                ).logits[0]  # fmt: skip
            losses = (F.cross_entropy(logits[:-1].double(), ids[1:], reduction="none") * weights).sum()
            total += float(losses / weights.sum() if weighting == "document" else losses)
            weights_seen += float(weights.sum())
            documents += 1
    return total / (documents if weighting == "document" else weights_seen)


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_the_loss_is_the_weighted_mean(datasets, module, weighting):
    dataset = datasets["some"]
    packs = PackLoader(dataset, packs_per_step=4).packs_of(0)
    expected = by_definition(module, dataset, packs, weighting)
    assert float(step_loss(module, dataset, weighting)) == pytest.approx(expected, rel=1e-5)


def test_weights_of_1_change_no_bit_of_the_loss(datasets, module):
    assert torch.equal(step_loss(module, datasets["ones"]), step_loss(module, datasets["none"]))


def test_the_divisor_is_the_sum_of_the_stored_weights(datasets):
    loader = PackLoader(datasets["some"], packs_per_step=4)
    stored = sum(
        float(datasets["some"][int(pack)]["loss_weights"].astype(np.float64).sum()) for pack in loader.packs_of(0)
    )
    assert loader.step_at(0).divisor == stored != loader.step_at(0).num_targets


def test_a_batch_carries_the_weight_of_each_label(datasets):
    batch = next(iter(PackLoader(datasets["some"])))
    labels, weights = batch["shift_labels"], batch["shift_weights"]
    assert ((labels != IGNORED) == (weights > 0)).all()
    assert len(weights.unique()) == 5
    assert "shift_weights" not in next(iter(PackLoader(datasets["none"])))


def test_evaluation_is_the_weighted_mean_too(datasets, module):
    dataset = datasets["some"]
    world = World(device=torch.device("cpu"))
    found = evaluate(module, module, dataset, world, tokens_per_batch=96, autocast=nullcontext())
    expected = by_definition(module, dataset, np.arange(len(dataset)), "token")
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_batches_for_other_trainers_carry_weights_beside_labels_that_only_a_weighted_one_knows(datasets):
    rows = [datasets["some"][number] for number in (0, 1)]
    batch = PackedCollator()(rows)
    assert "labels" not in batch
    assert batch["loss_weights"][0].tolist() == [weight for row in rows for weight in row["loss_weights"].tolist()]
    assert ((batch["weighted_labels"] != IGNORED) == (batch["loss_weights"] > 0)).all()
