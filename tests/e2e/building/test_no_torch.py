"""A build works where torch is not installed."""

import ast
import json
import os
import subprocess
import sys

import pytest

# Python runs sitecustomize at start-up, in the workers of a build too: there, torch can be found by nobody.
WITHOUT_TORCH = """
import importlib.machinery, sys


class WithoutTorch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)


sys.meta_path = [WithoutTorch if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture
def run_without_torch(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_TORCH)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture
def tokenizer_directory(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    return directory


def test_torch_cannot_be_found_in_this_environment(run_without_torch):
    done = run_without_torch("-c", "import transformers, datasets, importlib.util as u; print(u.find_spec('torch'))")
    assert done.stdout.split() == ["None"], done.stderr
    assert "No module named 'torch'" in run_without_torch("-c", "import torch").stderr


def test_a_corpus_is_built_verified_and_inspected_without_torch(run_without_torch, tokenizer_directory, tmp_path):
    lines = [json.dumps({"text": "a document of some words " * n}) for n in range(1, 40)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    built = run_without_torch(
        *["-m", "pipeline", "build", "corpus.jsonl", "--out", "dataset", "--tokenizer", str(tokenizer_directory)],
        *["--seq-len", "512", "--workers", "2"],
    )
    assert built.returncode == 0, built.stderr
    assert run_without_torch("-m", "pipeline", "verify", "dataset").returncode == 0
    inspected = run_without_torch("-m", "pipeline", "inspect", "dataset", "--json")
    assert inspected.returncode == 0, inspected.stderr
    assert json.loads(inspected.stdout)["documents"]["packed"] == 39


def test_a_small_build_imports_nothing_heavy(run_without_torch, tokenizer_directory, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "one two three"}\n' * 50)
    arguments = ["build", "c.jsonl", "--tokenizer", str(tokenizer_directory), "--seq-len", "64", "--out", "out"]
    code = (
        "import sys\nfrom pipeline.cli import main\n"
        f"try: main({arguments!r})\nfinally: print(sorted({{name.partition('.')[0] for name in sys.modules}}))"
    )
    done = run_without_torch("-c", code)
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert {"pyarrow", "tokenizers"} <= loaded, done.stderr
    heavy = {"pandas", "numba", "llvmlite", "transformers", "datasets", "fsspec", "fastokens", "gigatoken", "awkward"}
    assert not loaded & heavy
