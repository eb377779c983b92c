"""The exported model is the trained one: its files, its types, its end marks, and weights that adapters moved."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shards import PackError
from trainer import load_model
from trainer.saving.export import add_end_marks


@pytest.fixture
def tokenizer_files(dataset) -> Path:
    """The tokenizer's folder of the dataset, with one file that belongs there."""
    folder = dataset.path / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "special_tokens_map.json").write_text("{}")
    return folder


def test_nothing_but_tokenizer_files_goes_from_a_dataset_into_a_model(run, tokenizer_files):
    honest = run("honest", seed=1)[0]
    strangers = ("model.safetensors", "config.json", "pytorch_model.bin", "modeling.py", "README.md", "secret")
    for name in strangers:
        (tokenizer_files / name).write_bytes(b"stranger")
    result = run("attacked", seed=1)[0]
    ours, theirs = (load_file(each.model_dir / "model.safetensors") for each in (result, honest))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert {path.name for path in result.model_dir.iterdir()} == {path.name for path in honest.model_dir.iterdir()}
    assert (result.model_dir / "special_tokens_map.json").read_text() == "{}"
    assert all(path.read_bytes() != b"stranger" for path in result.model_dir.iterdir())


@pytest.mark.parametrize("kind", ["link", "pipe", "linked folder"])
def test_a_tokenizer_file_that_is_no_regular_file_is_refused_before_training(run, tokenizer_files, tmp_path, kind):
    (tmp_path / "secret").write_text("private")
    place = tokenizer_files / "chat_template.jinja"
    if kind == "link":
        place.symlink_to(tmp_path / "secret")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        tokenizer_files.rename(tmp_path / "elsewhere")
        tokenizer_files.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackError, match="is a link or no regular file; expected a file of its own"):
        run()
    assert not (tmp_path / "run").exists()


def test_exported_files_have_the_access_rights_of_any_new_file(run, tmp_path):
    result, _ = run(lora_rank=2)
    (tmp_path / "other").touch()
    files = [*result.model_dir.iterdir(), *(tmp_path / "run" / "adapter").iterdir()]
    assert len(files) >= 6
    assert {path.stat().st_mode for path in files} == {(tmp_path / "other").stat().st_mode}


def test_the_exported_model_names_no_code_of_the_base_model_s_author(run, model_config, capsys):
    auto_map = {"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    result, _ = run(model=model_config(auto_map=auto_map))
    assert "auto_map" not in json.loads((result.model_dir / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(result.model_dir, trust_remote_code=False).config.model_type == "llama"
    assert "auto_map of the base model's configuration is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "trained", "after"),
    [(None, [5], [5]), (2, [5], [2, 5]), ([2, 3], [3, 5], [2, 3, 5]), ([2, 3], [3], [2, 3]), (2, [], 2)],
)
def test_trained_end_marks_join_those_at_which_generation_stopped_before(model_config, before, trained, after):
    model = load_model(model_config()).model
    model.generation_config.eos_token_id = before
    notes = add_end_marks(model, trained)
    assert model.generation_config.eos_token_id == after
    assert len(notes) == (before != after)


@pytest.mark.parametrize("targets", [("lm_head",), ("embed_tokens",), ("q_proj", "lm_head"), ("q_proj",)])
def test_a_tied_model_with_adapters_on_its_head_is_exported_as_it_was_trained(
    run, model_config, dataset, targets, capsys
):
    result, lines = run(
        model=model_config(tie_word_embeddings=True), lora_rank=4, lora_targets=targets, lr=0.1, steps=8,
        schedule="constant", eval=str(dataset.path),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(result.model_dir, attn_implementation="eager").eval()
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (targets == ("q_proj",))
    assert tied or not torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    assert ("tied and are no longer" in capsys.readouterr().err) != tied
    total, targets_seen = 0.0, 0
    with torch.no_grad():
        for row in dataset:
            for start, stop in zip(row["cu_seqlens"][:-1], row["cu_seqlens"][1:], strict=True):
                ids = torch.from_numpy(row["input_ids"][start:stop].astype("int64"))[None]
                logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
                chosen = torch.from_numpy(row["loss_mask"][start:stop].astype(bool))[1:]
                total -= float(logits.gather(1, ids[0, 1:, None])[chosen].sum())
                targets_seen += int(chosen.sum())
    assert total / targets_seen == pytest.approx(lines.column("eval_loss")[-1], rel=1e-4)


def test_a_model_that_cannot_be_written_is_one_line(run, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    with pytest.raises(PackError, match=r"model: cannot write the model \(No space left on device\).*`resume`"):
        run()


def test_a_run_directory_whose_name_is_no_text_gets_its_model(run, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    result, _ = run(name, steps=1)
    assert (result.model_dir / "README.md").read_text(encoding="utf-8").splitlines()[5] == "# caf?"
    assert json.loads((tmp_path / name / "train.json").read_text())["out"].endswith(name)
