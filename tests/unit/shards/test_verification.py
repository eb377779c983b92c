"""Figures of a manifest that somebody changed and sealed again are found by verify, each with its rule."""

import json
from typing import Any

import pytest

from shards import Dataset, FormatError, verify
from shards.publish import seal

PACKS = {"web": [[3, 2], [4], [1, 1, 2]], "code": [[5], [2, 2]]}


def edit(record: Any, place: str, value: Any) -> None:
    """Set a value at a place such as sources.0.bound_packs."""
    *way, last = place.split(".")
    for key in way:
        record = record[int(key)] if isinstance(record, list) else record[key]
    record[int(last) if isinstance(record, list) else last] = value


@pytest.mark.parametrize(
    ("place", "value", "rule"),
    [
        ("seq_len", 0, "F1"),
        ("seq_len", 10**13, "F1"),
        ("packer", "bucketed", "F1"),
        ("tokenizer.max_id", 5, "F1"),
        ("tokenizer.max_id", 10**12, "F1"),
        ("plan_id", "0" * 64, "F2"),
        ("dataset_id", "0" * 64, "F1"),
        ("maxima.max_seqlen", 64, "F13"),
        ("maxima.num_segments", 0, "F13"),
        ("sources.0.lengths", [[1, 1, 1]], "F14"),
        ("sources.1.segment_lengths", [], "F14"),
        ("sources.0.bound_packs", 0, "F14"),
        ("sources.0.longest", [{"doc_id": 0, "tokens": 10**9}], "F14"),
        ("sources.0.name", "books", "F5"),
        ("totals.tokens.packed", 10**9, "F14"),
        ("totals.packs", 3, "F13"),
        ("index.rows", 3, "F13"),
        ("shards.rows", 1, "F17"),
        ("tokenizer_files", {"tokenizer.json": "0"}, "F15"),
        ("facts", [], "F1"),
        ("sources", None, "F1"),
    ],
)
def test_a_manifest_that_was_changed_and_sealed_again_is_found(write_dataset, place, value, rule):
    path = write_dataset(PACKS, seq_len=64)
    assert verify(path).ok
    record = json.loads((path / "manifest.json").read_text())
    del record["checksum"]
    edit(record, place, value)
    (path / "manifest.json").write_bytes(seal(record))
    assert rule in {problem.rule for problem in verify(path).problems}


def test_links_and_strangers_in_the_tokenizer_are_named(write_dataset, tokenizer_dir, tmp_path):
    path = write_dataset(PACKS, tokenizer=tokenizer_dir)
    assert verify(path).ok
    (tmp_path / "secret").write_text("x")
    (path / "tokenizer" / "merges.txt").symlink_to(tmp_path / "secret")
    (problem,) = verify(path).problems
    assert problem.rule == "F15"
    assert "'merges.txt', which is no regular file" in problem.message
    (path / "tokenizer" / "merges.txt").unlink()
    (path / "tokenizer" / "model.safetensors").write_text("x")
    assert [problem.rule for problem in verify(path).problems] == ["F15"]


def test_an_index_of_fewer_packs_is_refused_at_opening(write_dataset, tmp_path):
    small = write_dataset({"web": PACKS["web"][:1]}, name="small")
    path = write_dataset({"web": PACKS["web"]})
    (path / "index.arrow").write_bytes((small / "index.arrow").read_bytes())
    record = json.loads((path / "manifest.json").read_text())
    del record["checksum"]
    record["index"] = json.loads((small / "manifest.json").read_text())["index"]
    (path / "manifest.json").write_bytes(seal(record))
    with pytest.raises(FormatError, match=r"the index has 1 packs, the shards 3, the manifest 3 \(rule F13\)"):
        Dataset(path)


def test_a_shard_list_cannot_name_a_file_elsewhere(write_dataset):
    dataset = Dataset(write_dataset(PACKS))
    assert [shard["file"] for shard in dataset.shards] == [
        f"shards/{window:08d}-{shard['xxh3_128'][:16]}.arrow" for window, shard in enumerate(dataset.shards)
    ]
    assert "file" not in dataset.shards.columns, "the name follows from window and hash"
