"""Losses of documents: against logits of each segment alone, and against an evaluation."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shards import PackError
from shards.tables.scores import read_scores
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.documents.config import ScoreConfig
from trainer.documents.score import ScoreResult, score, summary_of, write_table
from trainer.evaluation import evaluate
from trainer.run import build_model

ALONE = World(device=torch.device("cpu"))


def config_of(dataset, model, tmp_path, **more):
    return ScoreConfig(
        dataset=dataset.path, model=model, out=tmp_path / "scores.parquet", dtype="fp32", device="cpu", **more
    )


@pytest.fixture
def saved_model(model_config, tmp_path):
    torch.manual_seed(5)
    path = tmp_path / "model"
    config = AutoConfig.from_pretrained(model_config(max_position_embeddings=512))
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def by_definition(dataset, model_path):
    """Sum of weight * loss, and of weights, by document: each segment alone through transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    found: dict[tuple[int, int], list[float]] = {}
    for row in dataset:
        bounds = row["cu_seqlens"].tolist()
        weights = row["loss_weights"] if "loss_weights" in row else row["loss_mask"]
        for place, (start, stop) in enumerate(pairwise(bounds)):
            ids = torch.tensor(row["input_ids"][start:stop].astype(np.int64))[None]
            with torch.no_grad():
                losses = -model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].double().numpy()
            weight = weights[start + 1 : stop].astype(np.float64)
            sums = found.setdefault((int(row["doc_ids"][place]), int(row["doc_parts"][place])), [0.0, 0.0, 0])
            sums[0] += float((losses * weight).sum())
            sums[1] += float(weight.sum())
            sums[2] += stop - start
    return found


@pytest.mark.parametrize("packer", ["ffd", "bucketed"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_documents_loss_is_that_of_its_segments_alone(
    make_dataset, documents, saved_model, tmp_path, packer, weighted
):
    weigh = (lambda count: np.linspace(0.1, 3, count)) if weighted else None
    dataset = make_dataset({"one": documents(40, 70, seed=1), "two": documents(9, 30, seed=2)}, 48, packer, weigh=weigh)
    expected = by_definition(dataset, saved_model)
    result = score(config_of(dataset, saved_model, tmp_path, tokens_per_batch=96), ALONE)
    rows = result.table.to_pylist()
    assert [(row["doc_id"], row["doc_part"]) for row in rows] == sorted(expected)
    assert any(row["tokens"] > 48 for row in rows)  # of several segments
    for row in rows:
        loss, weight, tokens = expected[row["doc_id"], row["doc_part"]]
        assert row["tokens"] == tokens
        assert row["weight"] == pytest.approx(weight)
        assert row["loss"] == pytest.approx(loss / weight, rel=2e-5)
    lm, _, _ = build_model(
        TrainConfig(dataset=dataset.path, model=saved_model, out=tmp_path, dtype="fp32", device="cpu"), ALONE, [dataset]
    )
    evaluated = evaluate(lm, lm, dataset, ALONE, tokens_per_batch=48, autocast=nullcontext())
    assert result.loss == pytest.approx(evaluated["eval_loss"], rel=1e-6)
    assert sum(row["targets"] for row in rows) == evaluated["eval_targets"]


def test_two_processes_share_the_documents(make_dataset, documents, saved_model, tmp_path, monkeypatch):
    dataset = make_dataset({"one": documents(30, 40)}, 48)
    whole = score(config_of(dataset, saved_model, tmp_path), ALONE)
    shares: list[object] = []

    def keep(value, world):
        shares.append(value)
        return shares

    monkeypatch.setattr("trainer.documents.score.gather", keep)
    for rank in range(2):
        shared = score(config_of(dataset, saved_model, tmp_path), World(rank=rank, size=2, device=ALONE.device))
    assert shared.table.drop_columns("loss").equals(whole.table.drop_columns("loss"))
    assert shared.table["loss"].to_pylist() == pytest.approx(whole.table["loss"].to_pylist(), rel=1e-6)


def test_a_document_without_targets_has_no_loss(make_dataset, saved_model, tmp_path):
    dataset = make_dataset({"one": [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 0])]}, 48)
    result = score(config_of(dataset, saved_model, tmp_path), ALONE)
    assert [row["loss"] is None for row in result.table.to_pylist()] == [False, True]
    assert summary_of(result)["without_targets"] == 1
    write_table(result.table, tmp_path / "s.parquet")
    scores = read_scores(tmp_path / "s.parquet", dataset.dataset_id)
    assert (scores.loss_of(1, 0), scores.worst(5)) == (None, [0])
    assert scores.loss_of(0, 0) == pytest.approx(result.loss)


def test_a_foreign_file_and_a_taken_name_are_refused(make_dataset, documents, saved_model, tmp_path):
    dataset = make_dataset({"one": documents(5, 20)}, 48)
    result = score(config_of(dataset, saved_model, tmp_path), ALONE)
    write_table(result.table, tmp_path / "scores.parquet")
    with pytest.raises(PackError, match="is there already"):
        config_of(dataset, saved_model, tmp_path)
    config_of(dataset, saved_model, tmp_path, overwrite=True)
    with pytest.raises(PackError, match="has come meanwhile"):
        write_table(result.table, tmp_path / "scores.parquet")
    metadata = {"dataset_id": dataset.dataset_id}
    for columns in ({"doc_id": ["a"]}, {"doc_id": [None]}, {"loss": ["high"]}, {"loss": [[1.0]]}):
        hostile = pa.table({"doc_id": [0], "doc_part": [0], "loss": [1.0], **columns}).replace_schema_metadata(metadata)
        pq.write_table(hostile, tmp_path / "hostile.parquet")
        with pytest.raises(PackError, match="expected whole numbers and a number"):
            read_scores(tmp_path / "hostile.parquet", dataset.dataset_id)
    with pytest.raises(PackError, match=r"holds scores of dataset .*; expected those of ffff"):
        read_scores(tmp_path / "scores.parquet", "f" * 64)
    (tmp_path / "x.parquet").write_bytes(b"no table")
    with pytest.raises(PackError, match="cannot be read as scores"):
        read_scores(tmp_path / "x.parquet", dataset.dataset_id)


def test_the_summary_names_the_documents_of_highest_loss(make_dataset, documents, saved_model, tmp_path):
    dataset = make_dataset({"one": documents(30, 40)}, 48)
    result = score(config_of(dataset, saved_model, tmp_path), ALONE)
    summary = summary_of(ScoreResult(result.table, result.loss, []))
    losses = sorted((row["loss"] for row in result.table.to_pylist()), reverse=True)
    assert [row["loss"] for row in summary["worst"]] == losses[:5]
    assert summary["quantiles"]["max"] == losses[0]
    assert summary["quantiles"]["p50"] == pytest.approx(float(np.median(losses)))
