"""A checkpoint becomes a model: the one that was asked for, as the run itself would have exported it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from shards import PackError
from trainer.config import ExportConfig
from trainer.export_model import export_model


@pytest.fixture
def finished(run, dataset, tmp_path, best_step):
    """A run of eight steps that is best at some step in between, with all its checkpoints."""
    run(steps=8, lr=0.5, schedule="constant", save_every=1, keep=8, eval=str(dataset.path), eval_every=1)
    return tmp_path / "run", best_step


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_newest_checkpoint_is_the_model_that_the_run_exported(finished):
    run, _ = finished
    model_dir, _ = export_model(ExportConfig(run=run))
    assert model_dir == run / "export" / "step-00000008" / "model"
    assert same(weights(model_dir), weights(run / "model"))


def test_a_step_and_the_best_are_the_models_of_runs_that_ended_there(finished, run, tmp_path):
    source, best = finished
    alone = run("alone", steps=best, lr=0.5, schedule="constant")[0]
    by_step, _ = export_model(ExportConfig(run=source, step=best, out=tmp_path / "by-step"))
    by_name, _ = export_model(ExportConfig(run=source, best=True, out=tmp_path / "by-name"))
    assert same(weights(by_step), weights(alone.model_dir))
    assert same(weights(by_name), weights(alone.model_dir))
    assert not same(weights(by_name), weights(source / "model"))


def test_adapters_are_merged_as_the_run_merges_them(run, tmp_path):
    result, _ = run(lora_rank=2, lr=0.05, dtype="bf16")
    model_dir, _ = export_model(ExportConfig(run=tmp_path / "run"))
    assert same(weights(model_dir), weights(result.model_dir))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": 9}, r"no checkpoint of step 9; expected one of steps 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"step": 2, "best": True}, "`step`: 2, and `best` names another checkpoint"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused(finished, fields, message):
    with pytest.raises(PackError, match=message):
        export_model(ExportConfig(run=finished[0], **fields))


def test_a_run_that_is_missing_or_has_saved_nothing_is_refused(tmp_path):
    with pytest.raises(PackError, match=r"checkpoints: holds no checkpoint; expected a run that saved one\."):
        export_model(ExportConfig(run=tmp_path / "no-such-run"))


def test_a_model_that_is_there_is_not_written_over(finished):
    run, _ = finished
    export_model(ExportConfig(run=run))
    with pytest.raises(PackError, match=r"model: is there already; expected none"):
        export_model(ExportConfig(run=run))


def test_a_best_that_leads_out_of_the_run_is_refused(finished, tmp_path):
    run, _ = finished
    (tmp_path / "elsewhere" / "step-00000001").mkdir(parents=True)
    (run / "checkpoints" / "best").unlink()
    (run / "checkpoints" / "best").symlink_to(tmp_path / "elsewhere" / "step-00000001")
    with pytest.raises(PackError, match="no best checkpoint"):
        export_model(ExportConfig(run=run, best=True))


def test_a_damaged_checkpoint_is_refused(finished):
    run, _ = finished
    seal = run / "checkpoints" / "step-00000002" / "checkpoint.json"
    content = json.loads(seal.read_text())
    content["files"]["state-0.safetensors"][1] = "0" * 32
    seal.write_text(json.dumps(content))
    with pytest.raises(PackError, match="step-00000002: is damaged"):
        export_model(ExportConfig(run=run, step=2))
