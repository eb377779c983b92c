"""The commands of README.md, run in their order in an empty directory."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(
    r"^```(?:bash|console|sh)\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
)
# Set-up and test targets; the demo and the tests themselves run in tests of their own.
SET_UP = ("git clone", "cd ", "make ", "TORCH_BACKEND=cpu make", "pip install", "python -m pip install")


def commands() -> list[str]:
    """Return every command of the page, continuation lines joined, prompts and printed output left out."""
    found = []
    for block in BLOCKS:
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        found += prompted or [line for line in lines if line.strip() and not line.startswith("#")]
    return found


def test_the_page_shows_how_to_build_inspect_and_train():
    assert {"build", "inspect", "train"} <= {c.split()[1] for c in commands() if c.startswith("pack ")}


@pytest.fixture
def workplace(tmp_path, tokenizer_dir):
    """An empty directory with what the page takes for granted: a corpus, and a model with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lines = [json.dumps({"text": f"document {n}: " + "a few words more " * (n % 37)}) for n in range(100)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=4096, **shape)).save_pretrained(
        tmp_path / "model"
    )
    return tmp_path


def test_every_command_of_the_page_works_in_order(workplace):
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    assert shutil.which("pack", path=environment["PATH"]), "the console script is not installed"
    ran = 0
    for command in commands():
        if command.startswith(SET_UP):
            continue
        done = subprocess.run(
            command, shell=True, cwd=workplace, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        ran += 1
    assert ran >= 3
