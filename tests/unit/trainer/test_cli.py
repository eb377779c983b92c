"""The commands' flags are the config's fields, and a model is judged by exit code."""

import json
import os
import sys
from dataclasses import fields, replace

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from shards.errors import PackError
from trainer.cli import train
from trainer.config import TrainConfig


def test_every_field_has_a_flag_of_its_name():
    flags = {parameter.name: parameter for parameter in train.params}
    for field in fields(TrainConfig):
        assert field.name in flags
        if field.name != "dataset":
            assert flags[field.name].opts == ["--" + field.name.replace("_", "-")]
            assert flags[field.name].help


def test_defaults_are_the_configs(monkeypatch):
    caught = []
    monkeypatch.setattr("trainer.loop.train", lambda config: caught.append(config))
    CliRunner().invoke(main, ["train", "d", "--model", "m", "--out", "o"])
    assert caught == [TrainConfig(dataset="d", model="m", out="o")]


@pytest.mark.parametrize(("own", "then"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_idly_unless_told_otherwise(monkeypatch, own, then):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    caught = []
    monkeypatch.setattr("trainer.loop.train", lambda config: caught.append(os.environ["OMP_WAIT_POLICY"]))
    CliRunner().invoke(main, ["train", "d", "--model", "m", "--out", "o"])
    assert caught == [then]


def test_lists_are_parsed(monkeypatch):
    caught = []
    monkeypatch.setattr("trainer.loop.train", lambda config: caught.append(config))
    flags = ["--mix", "web=0.7, code=0.3", "--lora-targets", "q_proj,v_proj", "--freeze", "a*", "--freeze", "b*"]
    CliRunner().invoke(main, ["train", "d", "--model", "m", "--out", "o", "--lora-rank", "4", *flags])
    assert caught[0].mix == (("web", 0.7), ("code", 0.3))
    assert caught[0].lora_targets == ("q_proj", "v_proj")
    assert caught[0].freeze == ("a*", "b*")


@pytest.mark.parametrize("mix", ["web=0.7,web=0.3", "web=nan,code=1", "web=inf", "web=0", "web=0,code=1", "web=-1"])
def test_a_mix_that_gives_no_shares_is_refused_before_anything_is_opened(mix):
    result = CliRunner().invoke(main, ["train", "d", "--model", "m", "--out", "o", "--mix", mix])
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: --mix: {mix}; expected each source once, with a finite weight above 0. "
        "To leave a source out, do not name it.\n"
    )


@pytest.mark.parametrize("mix", [",,", "web=1,", "web", "web="])
def test_a_mix_with_a_part_that_is_no_weight_is_refused(mix):
    result = CliRunner().invoke(main, ["train", "d", "--model", "m", "--out", "o", "--mix", mix])
    assert result.exit_code == 1
    assert "; expected NAME=WEIGHT, such as web=0.7,code=0.3." in result.stderr


def test_a_safe_model_is_accepted_and_an_unsafe_one_refused(model_config):
    accepted = CliRunner().invoke(main, ["check-model", model_config(), "--json"])
    assert accepted.exit_code == 0
    assert json.loads(accepted.stdout)["accepted"] is True
    refused = CliRunner().invoke(
        main, ["check-model", model_config(model_type="t5", d_model=16, is_encoder_decoder=True)]
    )
    assert refused.exit_code == 1
    assert "refused" in refused.output
    missing = CliRunner().invoke(main, ["check-model", "/nowhere/at/all.json"])
    assert missing.exit_code == 1
    assert len(missing.stderr.splitlines()) == 1


def test_wandb_that_is_missing_is_named_before_anything_is_written(dataset, model_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    flags = ["--model", model_config(), "--out", str(tmp_path / "run"), "--device", "cpu", "--wandb", "project"]
    result = CliRunner().invoke(main, ["train", str(dataset.path), *flags])
    assert result.exit_code == 1
    assert "--wandb: wandb is not installed" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta1": 1.5}, "`beta1`: 1.5; expected"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "`min_lr`: 0.001; expected at most `lr`"),
        ({"decay_steps": 5}, '`decay_steps`: `schedule="cosine"` has no final decay; .* Use `schedule="wsd"`'),
        ({"decay_steps": 0, "schedule": "wsd"}, "`decay_steps`: 0; expected at least 1"),
        ({"lora_targets": ("q_proj",)}, "`lora_targets`: there are no adapters; .* Add `lora_rank`"),
        ({"lora_alpha": 8}, "`lora_alpha`: there are no adapters; .* Add `lora_rank`"),
        ({"mix_by": "packs"}, "`mix_by`: there is no mix; .* Add `mix`"),
        ({"mix_stop": "longest"}, "`mix_stop`: there is no mix; .* Add `mix`"),
        ({"keep": 0}, "`keep`: 0; expected at least 1"),
        ({"seed": -1}, "`seed`: -1; expected a finite number, 0 or more"),
    ],
)
def test_settings_that_would_do_nothing_or_harm_are_refused(fields, message):
    with pytest.raises(PackError, match=message):
        TrainConfig(dataset="d", model="m", out="o", **fields)


def test_ctrl_c_is_one_line_that_says_how_to_go_on(monkeypatch, tmp_path):
    def stopped(config):
        (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.loop.train", stopped)
    result = CliRunner().invoke(main, ["train", "d", "--model", "m", "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert result.stderr == f"{tmp_path}: stopped; add --resume to continue from the newest checkpoint.\n"


def test_settings_come_from_a_file_or_from_an_earlier_run_and_flags_win(monkeypatch, tmp_path):
    caught = []
    monkeypatch.setattr("trainer.loop.train", lambda config: caught.append(config))
    config = TrainConfig(dataset="d", model="m", out="o", lr=1e-3, mix=(("web", 0.7),), freeze=("a*",), steps=4)
    (tmp_path / "train.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "run.toml").write_text(
        'dataset = "d"\nmodel = "m"\nout = "o"\nlr = 1e-3\nmix = "web=0.7"\nfreeze = ["a*"]'
    )
    for file in ("train.json", "run.toml"):
        CliRunner().invoke(main, ["train", "--config", str(tmp_path / file), "--steps", "9"])
    assert caught == [replace(config, steps=9)] * 2
    result = CliRunner().invoke(main, ["train", "--config", str(tmp_path / "run.toml"), "--print-config"])
    (tmp_path / "again.toml").write_text(result.output)
    CliRunner().invoke(main, ["train", "--config", str(tmp_path / "again.toml"), "--steps", "9"])
    assert caught[2] == caught[1]


def test_what_neither_flags_nor_a_file_give_is_a_usage_error():
    result = CliRunner().invoke(main, ["train", "d", "--out", "o"])
    assert result.exit_code == 2
    assert "Missing option '--model'" in result.stderr
