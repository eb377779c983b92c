"""`pack demo`: everything it promises is there, twice in a row; the real library with the real sizes is a long test."""

import json
import multiprocessing
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from pipeline.cli import main
from shards import Dataset
from trainer import demo, demo_corpus

FUNCTION = '''
def f{k}(x):
    """Return x plus {k}."""
    return x + {k}
'''


def small_library():
    """Modules of 1 to 40 functions, each with a docstring, and one that is no Python."""
    for k in range(40):
        yield f"m{k}.py", f'"""Module {k}."""\n' + "".join(FUNCTION.format(k=i) for i in range(k + 1))
    yield "broken.py", "def ("


@pytest.fixture
def small(monkeypatch):
    """A small library and a small model: the same way, shorter."""
    monkeypatch.setattr(demo_corpus, "read_library", small_library)
    monkeypatch.setattr(demo_corpus, "VOCAB_SIZE", 400)
    monkeypatch.setattr(demo, "VOCAB_SIZE", 400)
    monkeypatch.setattr(
        demo_corpus, "MODEL", demo_corpus.MODEL | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    )


def pack_demo(*arguments, code=0):
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_it_goes_the_whole_way_and_again(small, tmp_path):
    out = tmp_path / "demo"
    result = pack_demo("--out", str(out), "--steps", "6")
    assert Dataset(out / "data").manifest["totals"]["documents"]["packed"] == 41 + 40 + sum(range(1, 41))
    for said in ("checked)", "fill rate", "padded-longest", "length-bucketed", "packed-varlen", str(out.resolve())):
        assert said in result.stdout
    losses = [json.loads(line)["loss"] for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    commands = [line.strip() for line in result.stdout.split("your own data")[1].splitlines() if "pack " in line]
    assert [command.split()[1] for command in commands] == ["build", "inspect", "train"]
    assert "\x1b" not in result.stdout  # plain when piped
    assert not multiprocessing.active_children()
    printed = [line.partition("  pack ")[2] for line in result.stdout.splitlines() if re.match(r"\d  pack ", line)]
    assert [command.split()[0] for command in printed] == ["build", "verify", "inspect", "train", "bench"]
    for command in printed[:3]:  # a person who types them finds what the demo made
        assert CliRunner().invoke(main, shlex.split(command)).exit_code == 0
    refused = CliRunner().invoke(main, shlex.split(printed[3]))
    assert (refused.exit_code, refused.output.count("\n")) == (1, 1)

    shards = {path: path.stat().st_mtime_ns for path in (out / "data" / "shards").iterdir()}
    again = pack_demo("--out", str(out), "--steps", "1")
    assert {path: path.stat().st_mtime_ns for path in (out / "data" / "shards").iterdir()} == shards
    assert "Everything lies in" in again.stdout
    assert len((out / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_directory_of_another_python_is_made_anew(small, tmp_path):
    out = tmp_path / "demo"
    (out / "data").mkdir(parents=True)
    (out / "data" / "old").touch()
    (out / "demo.json").write_text('{"python": "2.7"}')
    demo.claim_directory(out)
    assert [path.name for path in out.iterdir()] == ["demo.json"]


def test_a_directory_with_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = pack_demo("--out", str(tmp_path), code=1)
    assert "holds something else" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_docstrings_of_modules_classes_and_functions_are_found():
    source = '"""M."""\nclass A:\n    """C."""\n    async def f(self):\n        """F."""\n\ndef g(): pass\n'
    assert list(demo_corpus.find_docstrings("m.py", source)) == [("m.py:", "M."), ("m.py:A", "C."), ("m.py:f", "F.")]
    assert list(demo_corpus.find_docstrings("m.py", "def (")) == []


def test_the_library_of_this_python_is_found():
    names = [name for name, _ in demo_corpus.read_library()]
    assert len(names) > 300
    assert "json/decoder.py" in names
    assert not [name for name in names if name.startswith(("test/", "site-packages/"))]


def session_of(process):
    """Return the session of a process, None for one that has ended."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


@pytest.mark.slow
def test_the_real_demo_learns_within_its_memory(tmp_path):
    out = tmp_path / "demo"
    command = [str(Path(sys.executable).parent / "pack"), "demo", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        said = process.communicate()[0]
    assert process.returncode == 0
    assert not [other for other in psutil.process_iter() if session_of(other) == process.pid]  # nobody is left running
    gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    assert gib < 3
    first, last = map(float, re.search(r"loss ([\d.]+) \S+ ([\d.]+)", said).groups())
    assert last < first - 1.5
    assert Dataset(out / "data").manifest["totals"]["documents"]["packed"] > 5000
