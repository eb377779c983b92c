"""Code that comes with a tokenizer or a model never runs, whatever a corpus on stdin answers; no command asks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import BuildConfig, build

QUESTION = ("trust_remote_code", "[y/N]", "Do you")


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """Return a directory that is tokenizer and model at once, both of them programs that leave a mark when they run."""
    directory = tmp_path / "evil"
    directory.mkdir()
    auto_map = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil.Evil")
    (directory / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    return directory


@pytest.mark.parametrize(
    "command",
    [
        "build - --tokenizer EVIL --seq-len 16 --out OUT",
        "build CORPUS --tokenizer EVIL --seq-len 16 --out OUT",
        "plan CORPUS --tokenizer EVIL",
        "plan CORPUS --tokenizer GOOD --model EVIL",
        "inspect DATASET --model EVIL",
        "verify DATASET --against CORPUS",
    ],
)
def test_no_command_runs_foreign_code_or_asks_to(tmp_path, tokenizer_dir, evil, command):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "one two three four"}\n')
    build(BuildConfig(sources=(str(corpus),), out=str(tmp_path / "d"), tokenizer=tokenizer_dir, seq_len=16))
    if command.startswith("verify"):  # a dataset that somebody sent, its tokenizer replaced
        for file in (tmp_path / "d" / "tokenizer").iterdir():
            file.unlink()
        for file in evil.iterdir():
            (tmp_path / "d" / "tokenizer" / file.name).write_bytes(file.read_bytes())
    places = {"EVIL": evil, "GOOD": tokenizer_dir, "CORPUS": corpus, "DATASET": tmp_path / "d", "OUT": tmp_path / "out"}
    arguments = [str(places.get(word, word)) for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        input="y\ny\n" + corpus.read_text(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    lines = done.stderr.strip().splitlines()
    assert not [line for line in lines if any(word in line for word in QUESTION)]
    assert lines[-1].startswith(("Error: ", str(tmp_path)))
    assert not (tmp_path / "ran").exists()
