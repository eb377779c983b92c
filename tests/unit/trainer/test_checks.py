"""Datasets, models and tokenizers that do not fit each other are refused before the first step."""

import shutil
from pathlib import Path

import pytest

from shards import PackError
from trainer import load_model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 50}, "token id 96 in the dataset"),
        ({"model_type": "gpt2", "max_position_embeddings": 20}, "expected at most 20"),
    ],
    ids=["vocabulary", "positions"],
)
def test_a_model_that_does_not_fit_the_dataset_is_refused(run, model_config, fields, message):
    with pytest.raises(PackError, match=message):
        run(model=model_config(**fields))


def test_an_unpacked_dataset_is_refused_unless_forced(run, make_dataset, documents):
    data = make_dataset({"main": documents(9, 30)}, 48, "unpacked")
    with pytest.raises(PackError, match=r"is unpacked.*`packer` auto, or pass `force`"):
        run("refused", dataset=str(data.path))
    assert run("forced", dataset=str(data.path), force=True)[0].steps == 4


def test_another_tokenizer_than_the_models_own_is_refused(
    run, dataset, model_config, tmp_path, tokenizer_dir, other_tokenizer_dir
):
    shutil.copytree(tokenizer_dir, dataset.path / "tokenizer", dirs_exist_ok=True)
    model = load_model(model_config()).model
    for name, tokenizer, accepted in (("same", tokenizer_dir, True), ("other", other_tokenizer_dir, False)):
        model.save_pretrained(tmp_path / name)
        shutil.copyfile(Path(tokenizer) / "tokenizer.json", tmp_path / name / "tokenizer.json")
        if accepted:
            run(f"run-{name}", model=str(tmp_path / name))
        else:
            with pytest.raises(PackError, match=r"its tokenizer differs .*model"):
                run(f"run-{name}", model=str(tmp_path / name))
            run(f"forced-{name}", model=str(tmp_path / name), force=True)


def test_an_eval_dataset_of_another_tokenizer_is_refused(run, dataset, tokenizer_dir, other_tokenizer_dir):
    eval_documents = dataset.path.parent / "eval"
    shutil.copytree(dataset.path, eval_documents)
    shutil.copytree(tokenizer_dir, dataset.path / "tokenizer", dirs_exist_ok=True)
    shutil.copytree(other_tokenizer_dir, eval_documents / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(PackError, match=r"`eval` .*eval: its tokenizer differs"):
        run(eval=str(eval_documents))
    run("forced", eval=str(eval_documents), force=True)


def test_a_dataset_without_a_target_is_refused(run, make_dataset):
    data = make_dataset({"main": [([1, 2, 3], [0, 0, 0])] * 40}, 48)
    with pytest.raises(PackError, match="has no targets; expected some"):
        run(dataset=str(data.path))


@pytest.mark.parametrize("fields", [{"mix": (("books", 1.0),)}, {"tokens_per_batch": 40}, {"packs_per_step": 10**6}])
def test_settings_that_do_not_fit_a_dataset_are_refused_before_a_model_is_loaded(run, monkeypatch, tmp_path, fields):
    monkeypatch.setattr("trainer.run.load_model", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    with pytest.raises(PackError, match=next(iter(fields)).replace("_", "[_-]")):
        run(**fields)
    assert not (tmp_path / "run").exists()
