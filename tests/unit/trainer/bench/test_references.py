"""Other projects' ways of feeding train the same thing as ours, where they are used as they must be."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.bench.compare import run_comparison
from trainer.bench.strategies import STRATEGIES, Sizes, StepPacks, split_pack
from trainer.model.loading import load_model

FOLDER = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture
def references(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("references")
    sys.modules.pop("references", None)


@pytest.fixture
def step(documents, make_dataset):
    """One step of thirty documents."""
    dataset = make_dataset({"main": documents(30, 40)}, 48)
    packs = [dataset.pack(row) for row in range(len(dataset))]
    return StepPacks(packs, [segment for pack in packs for segment in split_pack(pack)])


@pytest.fixture
def loaded(model_config):
    torch.manual_seed(0)
    return load_model(model_config(), device=torch.device("cpu"), compute_dtype=torch.float32, packed=False)


SIZES = Sizes(seq_len=48, batch=4, tokens_per_batch=96, longest=40)


def test_their_losses_are_those_of_padding_and_nothing_is_padded(references, loaded, step):
    names = ("padded-longest", "packed-varlen", *references.REFERENCES)
    result = run_comparison(names, loaded, [step], SIZES, "fp32", known=STRATEGIES | references.REFERENCES)
    rows = {row["strategy"]: row for row in result["rows"]}
    assert list(rows) == ["padded-longest", "packed-varlen (cpu)", "hf-flattening", "trl-packed"]
    for name in ("hf-flattening", "trl-packed"):
        assert rows[name]["losses"] == pytest.approx(rows["padded-longest"]["losses"], rel=1e-5)
        assert rows[name]["padding"] == 0
        assert rows[name]["tokens_per_step"] == result["steps"]["tokens"]


def test_the_default_cache_lets_documents_see_each_other(references, loaded, step):
    right, default = references.losses_by_cache(loaded, SIZES, step)
    assert abs(default - right) > 1e-4 * right


def test_a_gpu_with_flash_attn_4_alone_has_no_flash_attn_2(references, monkeypatch, tmp_path):
    """Version 4 puts `flash_attn.cute` there: a package of that name is found, and holds no kernel of version 2."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("flash_attn") is not None
    weight = SimpleNamespace(device=torch.device("cuda"))
    model = SimpleNamespace(parameters=lambda: iter([weight]), _supports_flash_attn=True)
    monkeypatch.setattr(references, "native_attention", lambda _: "sdpa")
    assert references.Flattened("flattening", SimpleNamespace(model=model), SIZES)._attention == "sdpa"
