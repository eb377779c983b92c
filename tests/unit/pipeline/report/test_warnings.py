"""What a report says of loose packs: who is to blame, and what helps."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.report.dataset import fewest_packs, inspect_dataset
from shards import Dataset
from shards.counts import length_histogram


def built(tmp_path, tokenizer_dir, words, *flags):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in words))
    fixed = ["--tokenizer", tokenizer_dir, "--seq-len", "256", "--workers", "1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, ["build", str(tmp_path / "corpus.jsonl"), *fixed, *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Dataset(tmp_path / "out")


def test_packs_that_small_windows_leave_loose_are_blamed_on_the_windows(tmp_path, tokenizer_dir):
    dataset = built(tmp_path, tokenizer_dir, [10] * 80, "--window-bytes", "220")
    report = inspect_dataset(dataset)
    windows, tokens = len(dataset.shards), int(dataset.index.num_tokens.sum())
    assert windows > 15
    assert report["fill"]["min_packs"] == -(-tokens // 256) < 0.8 * report["packs"]
    assert report["fill"]["min_packs_of_windows"] == report["packs"]
    assert report["fill"]["above_min"] == pytest.approx(report["packs"] / report["fill"]["min_packs"] - 1)
    (said,) = [warning for warning in report["warnings"] if "full" in warning]
    assert f"{windows} windows of {tokens // windows} tokens on average are packed one by one" in said
    assert "Larger --window-bytes, or fewer and larger files" in said
    shown = CliRunner().invoke(main, ["inspect", str(dataset.path)], env={"COLUMNS": "300"}).output
    assert f"since {windows} windows are packed alone)" in shown


def test_packs_that_the_packer_leaves_loose_are_blamed_on_the_packer(tmp_path, tokenizer_dir):
    words = [10, 58] * 40  # in corpus order a long document closes the pack of each short one
    report = inspect_dataset(built(tmp_path, tokenizer_dir, words, "--packer", "next-fit"))
    assert report["fill"]["min_packs_of_windows"] < 0.99 * report["packs"]
    assert "another --packer would fill them better" in " ".join(report["warnings"])


def test_packs_that_the_lengths_leave_loose_are_blamed_on_the_lengths(tmp_path, tokenizer_dir):
    report = inspect_dataset(built(tmp_path, tokenizer_dir, [34, 5] * 20))  # no two of the long ones share a pack
    assert report["fill"]["above_min"] == 0
    assert "with these lengths no packer could do better, another --seq-len may" in " ".join(report["warnings"])


def test_no_packing_of_the_lengths_is_below_the_bound():
    rng = np.random.default_rng(0)
    checked = 0
    for _ in range(50):
        lengths = rng.integers(1, 129, 8)
        bound = fewest_packs(length_histogram(lengths), 128, None)
        assert bound >= -(-int(lengths.sum()) // 128)
        assert bound >= (lengths > 64).sum()  # no two of them share a pack
        assert bound <= exhaustive(sorted(lengths.tolist(), reverse=True), [], 128)
        checked += bound > -(-int(lengths.sum()) // 128)
    assert checked > 5


def exhaustive(lengths: list[int], packs: list[int], seq_len: int) -> int:
    """Try every way to pack; return the fewest packs."""
    if not lengths:
        return len(packs)
    first, rest = lengths[0], lengths[1:]
    tries = [exhaustive(rest, [*packs, first], seq_len)]
    for position, full in enumerate(packs):
        if full + first <= seq_len and packs.index(full) == position:
            tries.append(exhaustive(rest, [*packs[:position], full + first, *packs[position + 1 :]], seq_len))
    return min(tries)
