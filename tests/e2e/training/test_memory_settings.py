"""Settings that save memory, in whole runs: they resume bit for bit, and processes agree or refuse."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

SETTINGS = {
    "dtype": "fp32", "lr": 1e-2, "tokens_per_batch": 128, "packs_per_step": 8, "log_every": 1, "device": "cpu",
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # matrices of 4,096 numbers and more: 8 bits hold these


@pytest.fixture
def wide(llama) -> str:
    path = Path(llama)
    path.write_text(json.dumps(json.loads(path.read_text()) | WIDE))
    return llama


def job(packed: str, model: str, out: Path, **fields) -> dict:
    return {"dataset": packed, "model": model, "out": str(out), **SETTINGS, **fields}


def losses(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def weights(out: Path) -> dict:
    return load_file(out / "model" / "model.safetensors")


def assert_resumes_bit_for_bit(run_training, packed: str, model: str, root: Path, **fields) -> None:
    jobs = [
        job(packed, model, root / "whole", steps=4, **fields),
        job(packed, model, root / "parts", steps=4, kill=("step", 3), save_every=2, **fields),
    ]
    assert run_training(jobs[:1]) == [0]
    assert run_training(jobs[1:]) == [-9]
    assert run_training([job(packed, model, root / "parts", steps=4, resume=True, **fields)]) == [0]
    assert losses(root / "parts") == losses(root / "whole")
    ours, theirs = weights(root / "parts"), weights(root / "whole")
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "muon", "adafactor"])
def test_an_optimizer_learns_and_resumes_bit_for_bit(packed, wide, tmp_path, run_training, optimizer):
    assert_resumes_bit_for_bit(run_training, packed, wide, tmp_path, optimizer=optimizer, schedule="constant")
    series = losses(tmp_path / "whole")
    assert series[4] < series[1] - 0.1


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "muon", "adafactor"])
def test_two_processes_move_the_weights_as_one_does(packed, wide, tmp_path, run_training, optimizer):
    fields = {"steps": 3, "optimizer": optimizer}
    assert run_training([job(packed, wide, tmp_path / "one", **fields)]) == [0]
    jobs = [job(packed, wide, tmp_path / "ddp", **fields)]
    if optimizer == "muon":
        jobs.append(job(packed, wide, tmp_path / "fsdp", shard="full", **fields))
    assert run_training(jobs, world_size=2) == [0, 0]
    for each in jobs:
        assert losses(Path(each["out"])) == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
