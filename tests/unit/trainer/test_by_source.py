"""The loss of each source: the same as that of its documents alone, whatever they are packed and trained with."""

import numpy as np
import pytest
import torch

from shards import Dataset, PackError
from trainer import PackLoader, TrainConfig
from trainer.feeding.feed import SourceNumbers


@pytest.fixture
def texts(documents) -> dict:
    """Documents of two sources, one of them with a slash in its name."""
    return {"web": documents(32, 48, seed=1, shortest=33), "code/py": documents(16, 48, seed=2, shortest=33)}


@pytest.mark.parametrize(
    ("packer", "fields"),
    [
        ("ffd", {}),
        ("ffd", {"tokens_per_batch": 192, "z_loss": 1e-3}),
        ("ffd", {"loss_weighting": "document"}),
        ("ffd", {"lora_rank": 2, "lora_targets": ("lm_head", "q_proj")}),
        ("bucketed", {"tokens_per_batch": 384}),
    ],
    ids=["plain", "z_loss", "document", "lora", "bucketed"],
)
def test_the_loss_of_a_source_is_that_of_its_documents_alone(run, make_dataset, texts, packer, fields):
    """One step with every document in it, against an evaluation of each source by itself."""
    wanted = {}
    for number, (name, part) in enumerate(texts.items()):
        path = str(make_dataset({name: part}, 48, "ffd", f"alone-{number}").path)
        wanted[name] = run(f"run-{number}", dataset=path, steps=1, lr=0.0, eval=path)[1][-1]
    both = make_dataset(texts, 48, packer, "both")
    assert len(both) == 48  # one document in a pack: all fit into one step
    _, (line,) = run("both", dataset=str(both.path), steps=1, packs_per_step=48, **fields)
    for name, figures in wanted.items():
        assert line[f"loss/{name}"] == pytest.approx(figures["eval_loss"], rel=1e-5)
        assert line[f"tokens/{name}"] == sum(len(ids) for ids, _ in texts[name])
    if not fields.get("z_loss") and fields.get("loss_weighting") != "document":
        targets = {name: sum(sum(mask) for _, mask in part) for name, part in texts.items()}
        together = sum(line[f"loss/{name}"] * number for name, number in targets.items()) / sum(targets.values())
        assert together == pytest.approx(line["loss"], rel=1e-5)


def test_one_source_has_no_line_of_its_own_and_several_can_be_left_out(run, make_dataset, texts):
    both = str(make_dataset(texts, 48, "ffd", "both").path)
    for name, fields in (("one", {}), ("off", {"dataset": both, "by_source": False})):
        assert not [key for key in run(name, steps=1, **fields)[1][0] if "/" in key]
    mixed = run("mixed", dataset=both, steps=1, mix=(("web", 1.0),))[1][0]
    assert not [key for key in mixed if "/" in key]


def test_by_source_changes_no_loss_and_no_gradient(run, make_dataset, texts):
    both = str(make_dataset(texts, 48, "ffd", "both").path)
    with_it, without = (run(str(on), dataset=both, by_source=on)[1] for on in (True, False))
    for key in ("loss", "grad_norm"):
        assert with_it.column(key) == without.column(key)


@pytest.mark.parametrize("static", [True, False])
def test_each_token_of_a_batch_knows_its_source(make_dataset, documents, static):
    texts = {"low": documents(20, 30, seed=1), "high": documents(20, 30, seed=2)}
    for number, part in enumerate(texts.values()):
        for ids, _ in part:
            ids[:] = [id % 40 + 40 * number for id in ids]
    dataset = make_dataset(texts, 48)
    loader = PackLoader(dataset, tokens_per_batch=96, static_shapes=static)
    loader.by_source = True
    seen = set()
    for batch in loader:
        assert batch["sources"].shape == (batch["input_ids"].numel(),)
        real = slice(0, batch["num_tokens"])
        assert torch.equal(batch["sources"][real], batch["input_ids"][0, real] // 40)
        seen |= set(batch["sources"].tolist())
    assert seen == {0, 1}


def test_sources_are_numbered_in_their_order_however_often_they_come():
    numbers = SourceNumbers([("web", 0, 3), ("code", 3, 5), ("web", 5, 6)])
    assert numbers.names == ["web", "code"]
    assert numbers.of(np.arange(6)).tolist() == [0, 0, 0, 1, 1, 0]


def test_several_evaluation_sets_give_one_figure_each_and_one_over_all_their_targets(run, make_dataset, texts):
    paths = {
        name.partition("/")[0]: make_dataset({name: part}, 48, "ffd", name[:3]).path for name, part in texts.items()
    }
    alone = {name: run(name, steps=1, lr=0.0, eval=str(path))[1][-1] for name, path in paths.items()}
    line = run("all", steps=1, lr=0.0, eval=",".join(f"{name}={path}" for name, path in paths.items()))[1][-1]
    for name, figures in alone.items():
        assert line[f"eval_loss/{name}"] == pytest.approx(figures["eval_loss"])
        assert (
            line[f"eval_targets/{name}"] == figures["eval_targets"] == int(Dataset(paths[name]).index.num_targets.sum())
        )
    targets = sum(figures["eval_targets"] for figures in alone.values())
    mean = sum(figures["eval_loss"] * figures["eval_targets"] for figures in alone.values()) / targets
    assert (line["eval_loss"], line["eval_targets"]) == (pytest.approx(mean), targets)


@pytest.mark.parametrize("text", ["web=", "=d", "web=d,web=e", "web=d,e"])
def test_evaluation_sets_without_a_name_of_their_own_are_refused(text):
    with pytest.raises(PackError, match=r"`eval`: .*; expected a directory, or NAME=DIR,NAME=DIR"):
        TrainConfig(dataset="d", model="m", out="o", eval=text)


def test_a_directory_whose_name_has_an_equals_sign_is_one_dataset(tmp_path):
    (tmp_path / "a=b").mkdir()
    config = TrainConfig(dataset="d", model="m", out="o", eval=tmp_path / "a=b")
    assert config.eval_paths() == {"": str(tmp_path / "a=b")}
