"""Dynamic batching as a way to train: a model that cannot take packed rows learns from padded rows of like length."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import BuildConfig, RecordOptions, build
from pipeline.cli import main
from shards import Dataset
from shards.cost import padded_length
from trainer import PackLoader

from_questions = RecordOptions(kind="instruction", prompt_field="prompt", completion_field="completion")


@pytest.fixture
def bucketed(tmp_path, tokenizer_dir):
    """Instructions of 5 to 300 tokens, one in a row."""
    rng = np.random.default_rng(0)
    words = np.array(["alpha", "beta", "gamma", "delta"])
    with (tmp_path / "questions.jsonl").open("w") as file:
        for length in rng.integers(1, 60, 120):
            record = {"prompt": "say", "completion": " ".join(rng.choice(words, length))}
            file.write(json.dumps(record) + "\n")
    out = str(tmp_path / "bucketed")
    config = BuildConfig(
        sources=(str(tmp_path / "questions.jsonl"),), out=out, tokenizer=tokenizer_dir, seq_len=512,
        packer="bucketed", records=from_questions,
    )  # fmt: skip
    build(config)
    return out


def test_a_model_that_builds_its_own_masks_trains_right(bucketed, tmp_path):
    config = {"model_type": "bloom", "vocab_size": 512, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    (tmp_path / "bloom.json").write_text(json.dumps(config))
    arguments = [bucketed, "--model", str(tmp_path / "bloom.json"), "--out", str(tmp_path / "run"), "--dtype", "fp32"]
    sizes = ["--tokens-per-batch", "1024", "--packs-per-step", "6"]
    result = CliRunner().invoke(main, ["train", *arguments, *sizes, "--steps", "1", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "all layers: run segment by segment, on rectangles, with transformers' eager" in result.stderr

    torch.manual_seed(0)  # the same first weights; then every document by itself
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    dataset = Dataset(bucketed)
    total = targets = 0
    rows = PackLoader(dataset, tokens_per_batch=1024, packs_per_step=6).packs_of(0)
    assert len(set(padded_length(dataset.index.max_seqlen, dataset.seq_len)[rows])) > 1
    with torch.no_grad():
        for row in rows.tolist():
            ids = torch.from_numpy(dataset[row]["input_ids"].astype("int64"))
            labels = ids.where(torch.from_numpy(dataset[row]["loss_mask"].astype(bool)), -100)
            total += float(model(ids[None], labels=labels[None], num_items_in_batch=1).loss)
            targets += int(dataset.index.num_targets[row])
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["targets"] == targets
    assert line["loss"] == pytest.approx(total / targets, rel=1e-5)


def test_lengths_do_not_arrive_sorted(bucketed):
    dataset = Dataset(bucketed)
    loader = PackLoader(dataset, tokens_per_batch=1024)
    epochs = [[batch["input_ids"].shape for batch in loader] for _ in range(2)]
    widths = [[width for _, width in shapes] for shapes in epochs]
    assert len(set(widths[0])) > 3
    assert widths[0] not in (sorted(widths[0]), sorted(widths[0], reverse=True))
    assert widths[0] != widths[1]
    assert all(rows * width <= 1024 for shapes in epochs for rows, width in shapes)
