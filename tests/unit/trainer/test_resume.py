"""Where a resumed run starts, what it says, and what it refuses; the settings of before count where nothing is left."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shards import PackError
from shards.lock import Lock
from shards.publish import LocalStore


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_resumed_run_keeps_its_packs_per_step_and_says_what_it_leaves_out(run, capsys):
    run(steps=2)
    _, lines = run(resume=True, packs_per_step=None)
    assert lines.column("tokens")[2] > 3 * 30  # still four packs
    assert "an epoch is" in capsys.readouterr().err


def test_resuming_an_empty_run_directory_starts_and_says_so(run, capsys, tmp_path):
    assert run("new", resume=True)[0].steps == 4
    assert f"resume: there is no checkpoint in {tmp_path / 'new'}, so training starts" in capsys.readouterr().err


def test_other_settings_of_a_resumed_run_are_said_one_line_each(run, capsys):
    run(steps=2, schedule="constant", lr=1e-3)
    capsys.readouterr()
    run(resume=True, schedule="wsd", lr=5e-3, decay_steps=1, packs_per_step=None, log_every=2)
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("resume")] == [
        "resume: goes on after step 2 of 4",
        "resume: steps 2 before, 4 now",
        "resume: lr 0.001 before, 0.005 now",
        "resume: schedule constant before, wsd now",
        "resume: decay_steps not set before, 1 now",
        "resume: the next step takes a learning rate of 5.00e-03; it would have been 1.00e-03 with the settings of "
        "before and their 2 steps",
        "resume: the learning rate goes on constant at 5.00e-03 until step 3, then linear to 0.00e+00 at 4; before: "
        "over after step 2",
    ]


@pytest.mark.parametrize("fields", [{}, {"lora_rank": 2}, {"dtype": "bf16", "freeze": ("*embed*",)}])
def test_nothing_on_disk_changes_where_nothing_is_left_to_train(run, tmp_path, fields):
    run(**fields)
    before = contents_of(tmp_path / "run")
    run(resume=True, lr=5e-3, schedule="constant", tensorboard=True, profile=True, **fields)
    assert contents_of(tmp_path / "run") == before
    assert not (tmp_path / "run" / "profile").exists()
    assert {"train.json", "README.md", "model.safetensors"} <= {path.name for path in before}


def test_a_run_that_died_before_its_model_was_written_gets_it_from_the_settings_that_trained_it(run, tmp_path):
    run()
    before = contents_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    run(resume=True, lr=5e-3)
    assert contents_of(tmp_path / "run") == before


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(run, tmp_path):
    run(save_every=2)
    for seal in (tmp_path / "run" / "checkpoints").glob("step-*/checkpoint.json"):
        seal.write_text("{")
    before = contents_of(tmp_path / "run")
    with pytest.raises(PackError, match=r"checkpoints: 2 checkpoints, none intact; .* choose another `out`\.$"):
        run(resume=True)
    assert contents_of(tmp_path / "run") == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(run, tmp_path, finished):
    run(save_every=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    if not finished:
        shutil.rmtree(tmp_path / "run" / "model")
    before = contents_of(tmp_path / "run")
    with pytest.raises(PackError, match=r"checkpoints: the checkpoints of this run are gone; .* another `out`\.$"):
        run(resume=True)
    assert contents_of(tmp_path / "run") == before


def test_a_run_that_died_before_its_first_checkpoint_starts_again(run, tmp_path, capsys):
    _, whole = run("whole", save_every=4)
    run(save_every=4)
    for name in ("checkpoints", "model"):
        shutil.rmtree(tmp_path / "run" / name)
    _, lines = run(resume=True, save_every=4)
    assert "so training starts from the first step" in capsys.readouterr().err
    assert lines.column("loss") == whole.column("loss")


def test_a_resumed_run_says_where_it_goes_on(run, capsys):
    run(steps=2)
    run(resume=True)
    assert "resume: goes on after step 2 of 4\n" in capsys.readouterr().err
    run(resume=True)
    assert "resume: all 4 steps are taken already; nothing is left to train\n" in capsys.readouterr().err


def test_resuming_behind_the_last_step_asked_for_is_refused_and_changes_nothing(run, tmp_path):
    run()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(PackError, match=r"run: has taken 4 steps already; expected at most 3, which this run asks for"):
        run(resume=True, steps=3)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert len(before) > 5


def test_a_checkpoint_of_another_model_is_refused(run):
    run(steps=2)
    with pytest.raises(PackError, match="`lora_rank` 0, this run has 4"):
        run(resume=True, lora_rank=4)


def test_a_checkpoint_of_another_dtype_is_refused_and_changes_nothing(run, tmp_path):
    run(steps=2)
    before = contents_of(tmp_path / "run")
    with pytest.raises(PackError, match=r"was saved with `dtype` 'fp32', this run has 'bf16'\. Resume with the same"):
        run(resume=True, dtype="bf16")
    assert contents_of(tmp_path / "run") == before


def test_adapters_are_not_resumed_under_another_scale(run):
    run(steps=2, lora_rank=2, lora_alpha=4)  # scaled by alpha / rank: other weights in effect
    with pytest.raises(PackError, match="was saved with `lora_alpha` 4, this run has 8"):
        run(resume=True, lora_rank=2, lora_alpha=8)


def test_both_rates_are_said_where_more_steps_bend_the_schedule(run, capsys):
    """Nerogar/OneTrainer#1604: the rate jumps, and only the number of steps is named"""
    run(steps=4, schedule="cosine", lr=1e-2, save_every=3)
    capsys.readouterr()
    run(steps=8, schedule="cosine", lr=1e-2, resume=True)
    before, now = 0.0, 1e-2 * (1 + math.cos(math.pi * 4 / 8)) / 2  # step 5 of 8, after the last of 4
    assert (
        f"resume: the next step takes a learning rate of {now:.2e}; it would have been {before:.2e} with the settings "
        "of before and their 4 steps\n"
        f"resume: the learning rate goes on cosine from {now:.2e} to 0.00e+00 at step 8; before: over after step 4\n"
    ) in capsys.readouterr().err


def test_a_resume_that_changes_nothing_says_nothing_of_the_schedule(run, capsys):
    shutil.rmtree(Path(run("copy", schedule="cosine", save_every=2)[0].model_dir).parent / "checkpoints/step-00000004")
    capsys.readouterr()
    run("copy", schedule="cosine", save_every=2, resume=True)
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("resume")] == [
        "resume: goes on after step 2 of 4"
    ]


def test_a_run_directory_in_which_another_training_writes_is_refused(run, tmp_path):
    run(steps=2)
    before = contents_of(tmp_path / "run")
    with Lock(LocalStore(tmp_path / "run"), "other", "training run", alone=True):
        for resume in (True, False):
            with pytest.raises(PackError, match=r"run: another training run writes there \(process \d+ on "):
                run(resume=resume)
    assert contents_of(tmp_path / "run") == before
    assert run(resume=True)[0].steps == 4


def test_the_lock_of_a_training_that_died_is_taken_over_and_said(run, tmp_path, capsys):
    run(steps=2)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with Lock(LocalStore(tmp_path / "run"), "other", "training run", alone=True):
        lock = json.loads((tmp_path / "run" / "lock.json").read_text())
    (owner,) = lock["owners"].values()
    owner["pid"] = int(ended.stdout)
    (tmp_path / "run" / "lock.json").write_text(json.dumps(lock))
    assert run(resume=True)[0].steps == 4
    assert f"took over the lock of process {int(ended.stdout)}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "lock.json").exists()
