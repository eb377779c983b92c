"""`pack verify --against`: every window of the dataset is looked for, and every one of the sources."""

import json

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from shards import Dataset

LINES = [json.dumps({"text": f"document {n} of the corpus"}) + "\n" for n in range(250)]
WINDOW_BYTES = 4096


@pytest.fixture
def dataset(tokenizer_dir, tmp_path):
    """Lines from standard input, which has no fingerprint, in three windows."""
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--window-bytes", str(WINDOW_BYTES), "--workers", "1"]
    build = ["build", "-", *flags, "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, build, input="".join(LINES), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert len(Dataset(tmp_path / "out").shards) == 3
    return str(tmp_path / "out")


def verify(dataset, lines):
    return CliRunner().invoke(main, ["verify", dataset, "--against", "-"], input="".join(lines), catch_exceptions=False)


def test_the_same_input_is_found_again(dataset):
    done = verify(dataset, LINES)
    assert done.exit_code == 0, done.output
    assert "250 documents of 3 windows tokenized again" in done.output


def test_input_that_ends_with_a_window_is_not_taken_for_all(dataset):
    size = first = 0
    while size < WINDOW_BYTES:  # the first window is the shortest run of whole lines of at least this size
        size += len(LINES[first])
        first += 1
    done = verify(dataset, LINES[:first])
    assert done.exit_code == 1
    assert "holds 3 windows, the sources give 1 (rule F2)" in done.output


def test_more_input_than_was_packed_is_a_fault(dataset):
    done = verify(dataset, LINES * 3)
    assert done.exit_code == 1
    assert "holds 3 windows, the sources give more (rule F2)" in done.output
