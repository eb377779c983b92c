"""Checkpoints: which are kept, which are skipped, and what a full disk leaves."""

import errno
import json
import pickle
from pathlib import Path

import pytest
import torch
import xxhash

import trainer.loop
import trainer.saving.checkpoint
from shards import PackError
from trainer.saving.slices import stage


def test_the_last_checkpoints_and_the_best_are_kept(run, dataset, tmp_path, best_step):
    _, lines = run(steps=8, save_every=1, keep=2, eval=str(dataset.path), eval_every=1)
    assert lines.column("eval_loss").index(min(lines.column("eval_loss"))) + 1 == best_step
    root, best = tmp_path / "run" / "checkpoints", f"step-{best_step:08d}"
    assert (root / "best").resolve().name == best
    assert {path.name for path in root.iterdir()} == {"best", best, "step-00000007", "step-00000008"}


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "seal"])
def test_a_damaged_checkpoint_is_skipped_with_a_message(run, tmp_path, damage, capsys):
    _, whole = run("whole", schedule="constant")
    run("hurt", steps=3, save_every=1, schedule="constant")
    newest = tmp_path / "hurt" / "checkpoints" / "step-00000003"
    file = next(newest.glob("*.safetensors")) if damage != "seal" else newest / "checkpoint.json"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    if damage == "remove":
        file.unlink()
    _, lines = run("hurt", resume=True, schedule="constant")
    assert "this checkpoint is skipped" in capsys.readouterr().err
    assert lines.column("loss") == whole.column("loss")


def test_a_full_disk_is_one_line_and_the_run_goes_on_from_what_is_whole(run, monkeypatch):
    publish = trainer.saving.checkpoint.Checkpoints._publish

    def fail_at_two(self, temporary, final, content, best):
        if content["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(self, temporary, final, content, best)

    monkeypatch.setattr(trainer.saving.checkpoint.Checkpoints, "_publish", fail_at_two)
    with pytest.raises(PackError, match=r"cannot write a checkpoint \(No space left on device\).*`resume`"):
        run("full", save_every=1)
    monkeypatch.undo()
    _, lines = run("full", resume=True, save_every=1)
    assert lines.column("loss") == run("whole")[1].column("loss")


class Trap:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.marker,))


def test_no_file_of_a_checkpoint_is_ever_unpickled(run, tmp_path):
    """Whatever a checkpoint holds, also with hashes that fit: reading it runs no code."""
    run(steps=2)
    folder, marker = tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "marker"
    seal = json.loads((folder / "checkpoint.json").read_text())
    assert len(seal["files"]) >= 2
    for name in [*seal["files"], ".metadata", "rng-0.pt"]:
        content = pickle.dumps(Trap(marker))
        (folder / name).write_bytes(content)
        seal["files"][name] = [len(content), xxhash.xxh3_128(content).hexdigest()]
    (folder / "checkpoint.json").write_text(json.dumps(seal))
    with pytest.raises((PackError, ValueError)):
        run(resume=True)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Trap(marker)))  # the trap works
    assert marker.exists()


def test_a_checkpoint_of_the_first_version_is_refused_with_the_reason(run, tmp_path):
    run(steps=2)
    seal = tmp_path / "run" / "checkpoints" / "step-00000002" / "checkpoint.json"
    seal.write_text(json.dumps(json.loads(seal.read_text()) | {"version": 1}))
    with pytest.raises(PackError, match=r"version 1; expected 2; the first version holds pickles, which can run code"):
        run(resume=True)


def test_a_checkpoint_with_a_file_that_no_save_wrote_is_skipped(run, tmp_path, capsys):
    run(steps=3, save_every=1)
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "state-9.safetensors").write_bytes(b"")
    _, lines = run(resume=True, steps=3, save_every=1)
    assert "step-00000003: holds state-9.safetensors, a stranger; this checkpoint is skipped" in capsys.readouterr().err
    assert lines.column("step") == [1, 2, 3]


def test_processes_share_out_what_all_of_them_hold():
    tensors = {str(number): torch.full((3,), float(number)) for number in range(7)}
    parts = [stage(tensors, rank, 3).tensors for rank in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(tensors)
    assert {len(part) for part in parts} == {2, 3}


@pytest.mark.parametrize("facts", [{}, {"step": "x"}, [], None])
def test_a_checkpoint_whose_facts_are_not_a_runs_is_one_line(run, tmp_path, facts):
    run(steps=2)
    seal = tmp_path / "run" / "checkpoints" / "step-00000002" / "checkpoint.json"
    seal.write_text(json.dumps(json.loads(seal.read_text()) | {"facts": facts}))
    with pytest.raises(PackError, match="its facts are not those of a run"):
        run(resume=True)
