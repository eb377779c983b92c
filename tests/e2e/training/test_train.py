"""`pack train` from a built dataset to a model that transformers loads, and what it says when it cannot."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.cli import main
from shards import Dataset
from trainer import loop


def pack_train(*arguments: str, code: int = 0):
    result = CliRunner().invoke(main, ["train", *arguments, "--device", "cpu"])
    assert result.exit_code == code, result.output
    return result


def metrics_of(out: Path, key: str = "loss") -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def test_a_model_learns_and_loads_in_transformers_alone(packed, llama, tmp_path, tokenizer_dir):
    out = tmp_path / "run"
    flags = ["--steps", "30", "--packs-per-step", "4", "--tokens-per-batch", "256", "--lr", "1e-2", "--dtype", "fp32"]
    result = pack_train(
        packed, "--model", llama, "--out", str(out), *flags, "--log-every", "5", "--eval", packed, "--json",
        "--eval-every", "10", "--tensorboard", "--profile",
    )  # fmt: skip
    losses = metrics_of(out)
    assert sorted(losses) == [1, 5, 10, 15, 20, 25, 30]
    assert losses[30] < 0.6 * losses[1]
    assert json.loads(result.stdout)["steps"] == 30
    assert (out / "profile" / "trace.json").stat().st_size
    assert list((out / "tensorboard").iterdir())
    assert (out / "checkpoints" / "best" / "checkpoint.json").exists()

    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tokenizer_dir).chat_template
    assert Dataset(packed).dataset_id in (out / "model" / "README.md").read_text()
    total, targets = 0.0, 0
    with torch.no_grad():
        for row in Dataset(packed):  # every document alone, by transformers' own attention and loss
            for start, stop in zip(row["cu_seqlens"][:-1], row["cu_seqlens"][1:], strict=True):
                ids = torch.from_numpy(row["input_ids"][start:stop].astype("int64"))
                labels = ids.where(torch.from_numpy(row["loss_mask"][start:stop].astype(bool)), -100)
                loss = model(input_ids=ids[None], labels=labels[None], num_items_in_batch=1).loss
                total, targets = total + float(loss), targets + int(row["loss_mask"][start:stop].sum())
    assert targets == int(Dataset(packed).index.num_targets.sum())
    assert metrics_of(out, "eval_loss")[30] == pytest.approx(total / targets, rel=1e-5)


def test_a_used_run_directory_is_refused(packed, llama, tmp_path):
    arguments = (packed, "--model", llama, "--out", str(tmp_path / "run"), "--steps", "1")
    pack_train(*arguments)
    result = pack_train(*arguments, code=1)
    assert "holds a run already. Continue it with --resume" in result.stderr


def test_resuming_a_finished_run_changes_nothing(packed, llama, tmp_path):
    arguments = (packed, "--model", llama, "--out", str(tmp_path / "run"), "--steps", "2")
    pack_train(*arguments)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    pack_train(*arguments, "--resume")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_log_file_holds_the_losses_and_no_marks_of_torchs_profiler(packed, llama, tmp_path):
    flags = ["--model", llama, "--out", str(tmp_path / "run"), "--steps", "6", "--log-every", "3", "--device", "cpu"]
    done = subprocess.run(  # C++ writes past what CliRunner catches
        [sys.executable, "-m", "pipeline", "train", packed, *flags, "--profile"],
        capture_output=True,
        text=True,
        check=True,
    )
    steps = [line.split()[1] for line in done.stderr.splitlines() if " loss " in line]
    assert steps == ["1/6", "3/6", "6/6"]
    assert "USDT" not in done.stderr + done.stdout
    assert (tmp_path / "run" / "profile" / "trace.json").stat().st_size


def test_a_log_that_nobody_reads_any_more_does_not_end_the_run(packed, llama, tmp_path):
    flags = ["--model", llama, "--out", str(tmp_path / "run"), "--steps", "12", "--log-every", "1", "--device", "cpu"]
    started = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "train", packed, *flags, "--save-every", "6"], stderr=subprocess.PIPE
    )
    assert started.stderr is not None
    while b"step 1/12" not in started.stderr.readline():
        pass
    started.stderr.close()
    assert started.wait(240) == 0
    assert sorted(metrics_of(tmp_path / "run")) == list(range(1, 13))
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_an_interrupted_run_saves_first_and_resumes_to_the_same_losses(packed, llama, tmp_path, monkeypatch, number):
    flags = (packed, "--model", llama, "--steps", "6", "--packs-per-step", "2", "--log-every", "1", "--dtype", "fp32")
    pack_train(*flags, "--out", str(tmp_path / "whole"))
    real = loop.take_step

    def interrupt_at_third(run, *rest):
        if run.step == 2:
            os.kill(os.getpid(), number)
        return real(run, *rest)

    monkeypatch.setattr(loop, "take_step", interrupt_at_third)
    stopped = pack_train(*flags, "--out", str(tmp_path / "run"), code=130)
    assert "stopped; add --resume to continue from the newest checkpoint" in stopped.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]
    monkeypatch.setattr(loop, "take_step", real)
    pack_train(*flags, "--out", str(tmp_path / "run"), "--resume")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens-per-batch", "100"], "--tokens-per-batch: 100; expected at least one pack of 128 tokens"),
        (["--tokens-per-batch", "256", "--packs-per-step", "3"], "expected a multiple of 2"),
        (["--packs-per-step", "1000000"], "packs"),
        (["--mix", "web"], "--mix: 'web'; expected NAME=WEIGHT"),
        (["--mix", "web=1"], "web"),
        (["--freeze", "nothing*"], "matches no parameter"),
        (["--eval-every", "3"], "Add --eval"),
        (["--shard", "full"], "Start it with torchrun"),
        (["--lr", "nan"], "--lr: nan"),
        (["--attention", "flash-attn"], "--attention flash-attn"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(packed, llama, tmp_path, flags, message):
    result = pack_train(packed, "--model", llama, "--out", str(tmp_path / "run"), *flags, code=1)
    assert message in result.stderr.splitlines()[-1]
    assert not (tmp_path / "run" / "checkpoints").exists()
