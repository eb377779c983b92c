"""What a stranger wrote reaches no terminal as a command: names of files and datasets, records, mistyped arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x0e\u202egnp.\u2066"
STEERING = [*map(chr, range(0x09)), *map(chr, range(0x0B, 0x20)), "\x7f", *map(chr, range(0x80, 0xA0)), *"\u202e\u2066"]


def pack(*arguments: object, encoding: str = "utf-8") -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(__file__).parents[3])}
    environment.pop("FORCE_COLOR", None)
    command = [sys.executable, "-m", "pipeline", *map(os.fsencode, map(str, arguments))]
    return subprocess.run(command, env=environment, capture_output=True, check=False)


def said(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return all that a terminal gets, which holds nothing that steers it."""
    text = (done.stdout + done.stderr).decode("utf-8", "strict")
    assert [letter for letter in STEERING if letter in text] == []
    assert "Traceback" not in text
    return text


@pytest.fixture(scope="module")
def evil(tokenizer_dir, tmp_path_factory):
    """A dataset under such a name, made of a file with such a name, of records with such text."""
    folder = tmp_path_factory.mktemp("evil")
    corpus = folder / f"corpus{EVIL}.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{EVIL} number {n}"}) + "\n" for n in range(20)))
    out = folder / f"out{EVIL}"
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--workers", "1"]
    done = pack("build", corpus, *flags, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "20 documents" in said(done)
    return corpus, out


def test_every_report_shows_names_without_obeying_them(evil, tokenizer_dir, tmp_path):
    corpus, out = evil
    for arguments in (
        ("inspect", out), ("inspect", out, out), ("show", out, "0"), ("show", out, "--grep", "number"),
        ("verify", out), ("plan", corpus, "--tokenizer", tokenizer_dir), ("inspect", out, "--rows", "--json"),
    ):  # fmt: skip
        done = pack(*arguments)
        assert done.returncode == 0, done.stderr
        assert said(done)
    assert "␛[2J\\x9b31m␎\\u202e" in said(pack("show", out, "0"))


@pytest.mark.parametrize(
    "arguments",
    [
        (f"inspect{EVIL}",),
        ("inspect", f"--{EVIL}"),
        ("inspect", f"nowhere{EVIL}"),
        ("inspect", "x", "--packs-per-step", EVIL),
        ("build", f"nowhere{EVIL}", "--tokenizer", "x", "--seq-len", "64", "--out", "y"),
        ("show", "x", "--doc", EVIL),
        (f"--{EVIL}",),
    ],
)
def test_an_error_shows_an_argument_without_obeying_it(arguments):
    done = pack(*arguments)
    assert done.returncode in (1, 2)
    assert "Error: " in said(done)


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
def test_a_stdout_of_another_encoding_gets_question_marks(evil, encoding):
    for arguments in (("inspect", evil[1], evil[1]), ("show", evil[1], "0")):
        done = pack(*arguments, encoding=encoding)
        assert (done.returncode, done.stderr) == (0, b"")
        done.stdout.decode("utf-8" if encoding == "ascii" else encoding)  # click takes ASCII for a lack of settings


def test_a_name_that_is_not_utf8_is_shown_and_has_a_page(tokenizer_dir, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "a word"}\n' * 9)
    out, page = os.fsdecode(os.fsencode(tmp_path) + b"/out\xff"), tmp_path / "page.html"
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--workers", "1"]
    assert "out\\xff: 9 documents" in said(pack("build", tmp_path / "corpus.jsonl", *flags, "--out", out))
    for arguments in (("inspect", out, "--html", page), ("inspect", out, out, "--html", page), ("show", out, "0")):
        done = pack(*arguments)
        assert done.returncode == 0, done.stderr
        assert said(done)
        assert "out?" in page.read_text(encoding="utf-8")
    run = os.fsencode(tmp_path) + b"/run\xff"
    os.mkdir(run)
    (Path(os.fsdecode(run)) / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    done = pack("inspect", os.fsdecode(run), os.fsdecode(run), "--html", page)
    assert done.returncode == 0, done.stderr
    assert "run\\xff" in said(done)
