"""Loops of other projects on our packs take the steps of `pack train`: each example gives its losses."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shards import Dataset
from trainer import PackedCollator, TrainConfig, load_model
from trainer.loop import train
from trainer.model.loading import load_config

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS, LR = 5, 1e-2
pytestmark = pytest.mark.filterwarnings("ignore")  # these libraries warn about themselves


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)


@pytest.fixture
def model_dir(llama: str, tmp_path: Path) -> str:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(load_config(llama)).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def expected(packed: str, model_dir: str, tmp_path: Path) -> list[float]:
    """The losses of `pack train`: packs in the order of its first epoch, four in a step."""
    train(
        TrainConfig(
            dataset=packed, model=model_dir, out=tmp_path / "ours", steps=STEPS, packs_per_step=4, lr=LR,
            schedule="constant", weight_decay=0.0, dtype="fp32", log_every=1, device="cpu",
        )
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(losses) == STEPS
    assert len(set(losses)) == STEPS
    return losses


@pytest.mark.parametrize(("workers", "start"), [(0, "fork"), (2, "fork"), (2, "spawn")])
def test_a_dataloader_whatever_its_workers(packed, model_dir, expected, workers, start):
    losses = example("with_dataloader")["train"](packed, model_dir, STEPS, LR, workers, start)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_goes_on_where_it_stopped(packed, model_dir, expected, tmp_path, workers):
    make = example("with_torchdata")["Run"]
    first = make(packed, model_dir, LR, workers)
    losses = first.train(2)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = make(packed, model_dir, LR, workers)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    losses += second.train(STEPS - 2)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_accelerate(packed, model_dir, expected):
    losses = example("with_accelerate")["train"](packed, model_dir, STEPS, LR, cpu=True)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_lightning(packed, model_dir, expected, tmp_path):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = quiet | {"accelerator": "cpu", "default_root_dir": str(tmp_path)}
    losses = example("with_lightning")["train"](packed, model_dir, STEPS, LR, **options)
    assert losses == pytest.approx(expected, rel=1e-5)


TWO_PROCESSES = """
import json, os, runpy, sys
name, packed, model, out = sys.argv[1:]
options = {"cpu": True}
if name == "lightning":
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = dict.fromkeys(shown, False) | {"accelerator": "cpu", "devices": 2, "default_root_dir": out}
train = runpy.run_path(f"EXAMPLES/with_{name}.py", run_name="example")["train"]
losses = train(packed, model, STEPS, LR, **options)
open(f"{out}/losses-{os.environ['RANK']}.json", "w").write(json.dumps(losses))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_two_processes_take_the_same_steps(packed, model_dir, expected, tmp_path, name):
    values = {"EXAMPLES": str(EXAMPLES), "STEPS": str(STEPS), "LR": str(LR)}
    script = tmp_path / "two.py"
    script.write_text(re.sub("|".join(values), lambda found: values[found[0]], TWO_PROCESSES))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [*launch, str(script), name, packed, model_dir, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads((tmp_path / f"losses-{rank}.json").read_text()) for rank in (0, 1))
    if name == "lightning":  # each process has its share
        first = [one + other for one, other in zip(first, second, strict=True)]
    assert first == pytest.approx(expected, rel=1e-5)


def row_of(sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The pack that arrays with segment ids say, for a model that takes packs."""
    segments = sample["inputs_segmentation"]
    real = int((segments > 0).sum())
    trained = sample["targets_segmentation"][: real - 1] > 0
    ids = sample["inputs"][:real]
    assert (sample["targets"][: real - 1][trained] == ids[1:][trained]).all()
    starts = np.flatnonzero(np.diff(segments[:real], prepend=0))
    return {
        "input_ids": ids,
        "cu_seqlens": np.array([*starts, real], np.int32),
        "loss_mask": np.array([0, *trained], np.uint8),
    }


def test_a_source_for_grain_holds_all_that_a_model_needs(packed, model_dir, expected):
    batches = iter(example("with_grain")["load"](packed))
    net = load_model(model_dir).model
    collate = PackedCollator(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        batch = next(batches)
        assert {values.shape for values in batch.values()} == {(4, Dataset(packed).seq_len)}
        rows = [row_of({name: np.asarray(values[k]) for name, values in batch.items()}) for k in range(4)]
        targets = sum(int(row["loss_mask"].sum()) for row in rows)
        loss = net(**collate(rows), num_items_in_batch=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_rows_of_the_grain_example_are_those_of_its_docstring():
    row = {
        "input_ids": np.array([5, 6, 7, 8, 9]),
        "position_ids": np.array([0, 1, 2, 0, 1]),
        "cu_seqlens": np.array([0, 3, 5]),
        "loss_mask": np.array([0, 1, 1, 0, 1]),
    }
    found = example("with_grain")["features"](row, 6)
    assert {name: values.tolist() for name, values in found.items()} == {
        "inputs": [5, 6, 7, 8, 9, 0],
        "inputs_segmentation": [1, 1, 1, 2, 2, 0],
        "inputs_position": [0, 1, 2, 0, 1, 0],
        "targets": [6, 7, 0, 9, 0, 0],
        "targets_segmentation": [1, 1, 0, 2, 0, 0],
    }
