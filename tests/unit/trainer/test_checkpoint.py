"""Checkpoints: which are kept, which are skipped, and what a full disk leaves."""

import errno

import pytest

import trainer.checkpoint
import trainer.loop
from shards import PackError


def test_the_last_checkpoints_and_the_best_are_kept(run, dataset, tmp_path):
    # a rate this high makes the loss worse from some step on
    _, lines = run(steps=8, lr=0.5, schedule="constant", save_every=1, keep=2, eval=str(dataset.path), eval_every=1)
    losses = lines.column("eval_loss")
    best = losses.index(min(losses)) + 1
    assert best < 7, "the test needs a best step that would not be kept anyway"
    root = tmp_path / "run" / "checkpoints"
    assert (root / "best").resolve().name == f"step-{best:08d}"
    assert {path.name for path in root.iterdir()} == {"best", f"step-{best:08d}", "step-00000007", "step-00000008"}


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "seal"])
def test_a_damaged_checkpoint_is_skipped_with_a_message(run, tmp_path, damage, capsys):
    _, whole = run("whole", schedule="constant")
    run("hurt", steps=3, save_every=1, schedule="constant")
    newest = tmp_path / "hurt" / "checkpoints" / "step-00000003"
    file = next(newest.glob("*.distcp")) if damage != "seal" else newest / "checkpoint.json"
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
    publish = trainer.checkpoint.Checkpoints._publish

    def fail_at_two(self, temporary, final, content, best):
        if content["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(self, temporary, final, content, best)

    monkeypatch.setattr(trainer.checkpoint.Checkpoints, "_publish", fail_at_two)
    with pytest.raises(PackError, match=r"cannot write a checkpoint \(No space left on device\).*`resume`"):
        run("full", save_every=1)
    monkeypatch.undo()
    _, lines = run("full", resume=True, save_every=1)
    assert lines.column("loss") == run("whole")[1].column("loss")
