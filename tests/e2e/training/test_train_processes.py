"""Several processes and dead processes: the same gradients, the same order, the same losses."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline import BuildConfig, build
from shards import Dataset

SETTINGS = {
    "dtype": "fp32", "lr": 1e-2, "schedule": "constant", "tokens_per_batch": 128, "packs_per_step": 8, "log_every": 1,
    "device": "cpu", "keep": 9, "clip": 0.5,
}  # fmt: skip


@pytest.fixture
def build_two_sources(tmp_path, tokenizer_dir) -> str:
    """A dataset of two named sources."""
    sources = []
    for name, words in (("short", 3), ("long", 40)):
        text = json.dumps({"text": " ".join(["quick", "brown", "fox", name] * words)})
        (tmp_path / f"{name}.jsonl").write_text(f"{text}\n" * 60)
        sources.append(f"{name}={tmp_path / name}.jsonl")
    config = BuildConfig(sources=tuple(sources), out=str(tmp_path / "two"), tokenizer=tokenizer_dir, seq_len=128)
    build(config)
    return config.out


def job(packed: str, llama: str, out: Path, **fields) -> dict:
    return {"dataset": packed, "model": llama, "out": str(out), **SETTINGS, **fields}


def figures_of(out: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def assert_same_run(left: Path, right: Path, steps: int, tolerance: float = 2e-5) -> None:
    for key in ("loss", "grad_norm"):
        expected = figures_of(left, key)
        assert sorted(expected) == list(range(1, steps + 1))
        assert figures_of(right, key) == pytest.approx(expected, rel=tolerance, abs=0)
    ours, theirs = (load_file(out / "model" / "model.safetensors") for out in (left, right))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert theirs[name].sub(tensor).abs().max() < 1e-3, name  # Adam turns tiny gradients into steps of size lr


def test_two_processes_take_the_same_steps_as_one(packed, llama, tmp_path, run_training):
    fields = {"steps": 3, "eval": packed, "loss_weighting": "document"}
    assert run_training([job(packed, llama, tmp_path / "one", **fields)]) == [0]
    jobs = [
        job(packed, llama, tmp_path / "ddp", **fields),
        job(packed, llama, tmp_path / "fsdp", shard="full", **fields),
    ]
    assert run_training(jobs, world_size=2) == [0, 0]
    for name in ("ddp", "fsdp"):
        assert_same_run(tmp_path / "one", tmp_path / name, 3)
        assert figures_of(tmp_path / name, "eval_loss") == pytest.approx(
            figures_of(tmp_path / "one", "eval_loss"), rel=1e-4
        )


def test_a_run_moves_from_two_processes_to_one_and_back(packed, llama, tmp_path, run_training):
    assert run_training([job(packed, llama, tmp_path / "whole", steps=6)]) == [0]
    out = tmp_path / "moving"
    assert run_training([job(packed, llama, out, steps=2, shard="full")], world_size=2) == [0, 0]
    assert run_training([job(packed, llama, out, steps=4, resume=True)]) == [0]
    assert run_training([job(packed, llama, out, steps=6, resume=True)], world_size=2) == [0, 0]
    assert_same_run(tmp_path / "whole", out, 6)


@pytest.mark.parametrize(
    ("rank", "step", "number", "shard"),
    [(0, 1, signal.SIGTERM, "none"), (1, 3, signal.SIGUSR1, "full"), (1, 0, signal.SIGHUP, "none")],
)
def test_a_signal_to_one_process_saves_the_same_step_on_all(
    packed, llama, tmp_path, run_training, rank, step, number, shard
):
    """NVIDIA-NeMo/Automodel#405: 70 steps lost at every preemption"""
    fields = {"steps": 8, "shard": shard}
    assert run_training([job(packed, llama, tmp_path / "whole", **fields)], world_size=2) == [0, 0]
    out = tmp_path / "stopped"
    stopped = run_training([job(packed, llama, out, ask=(rank, step, int(number)), **fields)], world_size=2)
    assert stopped == [1, 1]
    (saved,) = (path.name for path in (out / "checkpoints").glob("step-*"))
    assert saved == f"step-{step + 2:08d}"  # what one heard in step n, all know after step n + 1
    assert run_training([job(packed, llama, out, resume=True, **fields)], world_size=2) == [0, 0]
    assert_same_run(tmp_path / "whole", out, 8)


@pytest.mark.parametrize(("world_size", "step", "last"), [(1, 2, 6), (1, 6, 6), (2, 3, 6), (2, 6, 6)])
def test_a_signal_while_a_checkpoint_is_written_loses_no_step(
    packed, llama, tmp_path, run_training, world_size, step, last
):
    fields = {"steps": last, "save_every": 1}
    assert run_training([job(packed, llama, tmp_path / "whole", **fields)], world_size) == [0] * world_size
    out = tmp_path / "stopped"
    asked = {"ask_in_save": (world_size - 1, step, int(signal.SIGTERM))}
    assert run_training([job(packed, llama, out, **asked, **fields)], world_size) == [1] * world_size
    saved = max(path.name for path in (out / "checkpoints").glob("step-*"))
    assert saved >= f"step-{step:08d}"
    assert not list((out / "checkpoints").glob("_tmp-*"))
    assert not (out / "model").exists()
    assert run_training([job(packed, llama, out, resume=True, **fields)], world_size) == [0] * world_size
    assert_same_run(tmp_path / "whole", out, last)


FEW = [[("step", 3), ("publish", 4)], [("publish", 2), ("step", 6)]]
MANY = [[(place, step), (place, step + 2)] for place in ("step", "publish") for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("places", [*FEW, *(pytest.param(places, marks=pytest.mark.slow) for places in MANY)])
def test_a_killed_run_resumes_to_identical_losses(packed, llama, tmp_path, run_training, places):
    fields = {"steps": 7, "save_every": 1, "schedule": "cosine"}
    assert run_training([job(packed, llama, tmp_path / "whole", **fields)]) == [0]
    out = tmp_path / "killed"
    for number, place in enumerate(places):
        assert run_training([job(packed, llama, out, resume=number > 0, kill=place, **fields)]) == [-9]
    assert run_training([job(packed, llama, out, resume=True, **fields)]) == [0]
    assert figures_of(out, "loss") == figures_of(tmp_path / "whole", "loss")
    assert figures_of(out, "grad_norm") == figures_of(tmp_path / "whole", "grad_norm")
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("killed", "whole"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_adapters_are_saved_in_the_type_that_they_were_trained_in_sharded_or_not(packed, llama, tmp_path, run_training):
    fields = {"steps": 2, "lora_rank": 2, "dtype": "bf16"}
    assert run_training([job(packed, llama, tmp_path / "whole", **fields)]) == [0]
    assert run_training([job(packed, llama, tmp_path / "sharded", shard="full", **fields)], world_size=2) == [0, 0]
    for name in ("whole", "sharded"):
        tensors = load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}, name


def test_a_run_that_draws_its_packs_anew_is_the_same_on_two_processes_and_after_a_stop(
    packed, llama, tmp_path, run_training
):
    steps = 2 * (len(Dataset(packed)) // 8) + 1  # into the third epoch
    fields = {"steps": steps, "repack": True, "order": "cost-grouped"}
    assert run_training([job(packed, llama, tmp_path / "whole", **fields)]) == [0]
    out = tmp_path / "moving"
    first = fields | {"steps": steps - 2}
    assert run_training([job(packed, llama, out, **first)], world_size=2) == [0, 0]
    assert run_training([job(packed, llama, out, resume=True, **fields)]) == [0]
    assert_same_run(tmp_path / "whole", out, steps)
    stored = fields | {"repack": False}
    assert run_training([job(packed, llama, tmp_path / "stored", **stored)]) == [0]
    assert figures_of(tmp_path / "stored", "loss") != figures_of(out, "loss")


def test_the_loss_of_each_source_is_the_same_on_two_processes(build_two_sources, llama, tmp_path, run_training):
    fields = {"steps": 2, "packs_per_step": 64}
    assert run_training([job(build_two_sources, llama, tmp_path / "one", **fields)]) == [0]
    jobs = [
        job(build_two_sources, llama, tmp_path / "ddp", **fields),
        job(build_two_sources, llama, tmp_path / "fsdp", shard="full", **fields),
    ]
    assert run_training(jobs, world_size=2) == [0, 0]
    for key in ("loss/short", "loss/long", "tokens/short", "tokens/long"):
        expected = figures_of(tmp_path / "one", key)
        assert sorted(expected) == [1, 2]
        for name in ("ddp", "fsdp"):
            assert figures_of(tmp_path / name, key) == pytest.approx(expected, rel=1e-4)


def test_two_processes_train_a_model_with_layers_on_rectangles_as_one_does(packed, tmp_path, run_training):
    fields = {
        "model_type": "qwen3_next", "vocab_size": Dataset(packed).max_token_id + 1, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "mlp_only_layers": [0, 1], "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "tie_word_embeddings": False,
    }  # fmt: skip
    model = tmp_path / "hybrid.json"
    model.write_text(json.dumps(fields))
    settings = {"steps": 3, "eval": packed}
    assert run_training([job(packed, str(model), tmp_path / "one", **settings)]) == [0]
    jobs = [
        job(packed, str(model), tmp_path / "ddp", **settings),
        job(packed, str(model), tmp_path / "fsdp", shard="full", **settings),
    ]
    assert run_training(jobs, world_size=2) == [0, 0]
    for name in ("ddp", "fsdp"):
        assert_same_run(tmp_path / "one", tmp_path / name, 3, tolerance=1e-4)
