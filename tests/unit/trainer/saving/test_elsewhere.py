"""Checkpoints under a URL: what is uploaded, what comes back, and what a failing store does to a run."""

import shutil
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from shards import PackError
from shards.fetching import remote
from trainer.saving.elsewhere import RemoteCheckpoints

URL = "memory://runs/first"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/runs", recursive=True)


def names(store: Any) -> list[str]:
    return sorted(path.rsplit("/", 1)[1] for path in store.ls("/runs/first", detail=False))


def test_a_run_goes_on_elsewhere_from_what_was_uploaded(run, store, tmp_path, capsys):
    _, whole = run("whole", schedule="constant")
    run("here", steps=3, save_every=1, schedule="constant", checkpoint_url=URL)
    assert names(store) == ["step-00000002", "step-00000003"]
    shutil.rmtree(tmp_path / "here")  # another machine has nothing of it
    _, lines = run("there", resume=True, schedule="constant", checkpoint_url=URL)
    assert "took step-00000003 from there" in capsys.readouterr().err
    assert lines.column("loss") == whole.column("loss")[3:]


def test_the_best_one_is_kept_there_too(run, store, dataset, best_step):
    run(steps=8, save_every=1, keep=2, eval=str(dataset.path), eval_every=1, checkpoint_url=URL)
    assert names(store) == ["best.json", f"step-{best_step:08d}", "step-00000007", "step-00000008"]


@pytest.mark.parametrize("damage", ["seal", "file", "flip"])
def test_what_is_not_whole_there_is_passed_over(run, store, tmp_path, damage, capsys):
    _, whole = run("whole", schedule="constant")
    run("here", steps=3, save_every=1, schedule="constant", checkpoint_url=URL)
    newest = "/runs/first/step-00000003"
    state = f"{newest}/state-0.safetensors"
    if damage == "flip":
        content = bytearray(store.cat_file(state))
        content[len(content) // 2] ^= 1
        store.pipe_file(state, bytes(content))
    else:
        store.rm_file(f"{newest}/checkpoint.json" if damage == "seal" else state)
    _, lines = run("there", resume=True, schedule="constant", checkpoint_url=URL)
    printed = capsys.readouterr().err
    assert "step-00000003: is not whole; this checkpoint is skipped" in printed
    assert "took step-00000002 from there" in printed
    assert lines.column("loss") == whole.column("loss")[2:]


def test_a_newer_checkpoint_here_is_taken_before_an_older_one_there(run, store, capsys):
    run("here", steps=2, save_every=1, checkpoint_url=URL)
    run("here", steps=3, save_every=1, resume=True)
    run("here", resume=True, checkpoint_url=URL)
    assert "from there" not in capsys.readouterr().err


def test_a_place_with_checkpoints_of_another_run_is_refused(run, store):
    run("here", steps=1, checkpoint_url=URL)
    with pytest.raises(PackError, match=r"`checkpoint_url`: memory://runs/first holds step-00000001 of a run already"):
        run("other", steps=1, checkpoint_url=URL)


def test_a_store_that_fails_is_said_and_ends_a_run_only_where_the_last_upload_fails(
    run, store, tmp_path, monkeypatch, capsys
):
    put_file, broken = type(store).put_file, True

    def put(this: Any, source: str, target: str, **named: Any) -> None:
        if broken and ("step-00000001" in target or "step-00000003" in target):
            raise OSError("the store is away")
        put_file(this, source, target, **named)

    monkeypatch.setattr(type(store), "put_file", put)
    run("here", steps=2, save_every=1, checkpoint_url=URL)
    assert "cannot be written (the store is away, 6 times in a row)" in capsys.readouterr().err
    assert names(store) == ["step-00000002"]
    with pytest.raises(PackError, match=r"step-00000003.*cannot be written .* is intact in .*step-00000003: copy it"):
        run("here", steps=3, resume=True, checkpoint_url=URL)
    broken = False
    run("here", steps=4, resume=True, checkpoint_url=URL)
    assert "step-00000004" in names(store)


def test_a_checkpoint_whose_seal_names_files_elsewhere_is_not_read(store, tmp_path, capsys):
    store.pipe_file("/runs/first/step-00000001/checkpoint.json", b'{"files": {"../../secret": [1, "0"]}}')
    RemoteCheckpoints(URL).fetch_newest(tmp_path / "checkpoints", lambda path: True)
    assert "is not whole" in capsys.readouterr().err
    assert list(tmp_path.rglob("secret")) == []
