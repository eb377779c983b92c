"""Figures of a manifest that somebody changed and sealed again are found by verify, each with its rule."""

import json
from typing import Any

import pytest

from shards import Dataset, FormatError, verify
from shards.metadata import parse_manifest
from shards.plan import parse_plan
from shards.publish import canonical, seal
from shards.sidecar import sidecar_name
from shards.tables.provenance import spans_of

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
        ("sources.0.name", "books", "F1"),
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


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("sources.0.name", "../books", r"sources\[0\].name is '../books'; expected letters, digits"),
        ("sources.0.name", "", r"sources\[0\].name is ''; expected letters"),
        ("sources.1.name", "web", "two of its sources have the name 'web'"),
        ("seed", 1 << 63, "seed is 9223372036854775808; expected a number of 64 bits"),
    ],
)
def test_a_plan_that_names_its_sources_so_that_files_could_be_elsewhere_is_refused(
    write_dataset, place, value, expected
):
    path = write_dataset(PACKS, seq_len=64)
    record = json.loads((path / "plan.json").read_text())
    edit(record, place, value)
    with pytest.raises(FormatError, match=rf"plan\.json: {expected}.*\(rule F2\)"):
        parse_plan(canonical(record), "plan.json")


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("sources.0.lengths", [[0, 1, 5]], "counts 1 lengths from 0 on, of 5 tokens in all"),
        ("sources.0.lengths", [[4, 3, 11]], "counts 3 lengths from 4 on, of 11 tokens in all"),
        ("sources.0.lengths", [[4, 0, 11]], "counts 0 lengths from 4 on"),
        ("sources.1.segment_lengths", [[65, 1, 65]], "counts 1 lengths from 65 on"),  # seq_len is 64
        ("totals.packs", 1 << 64, "totals.packs is 18446744073709551616; expected a number of 64 bits"),
        ("facts.trained_end_ids", ["x"], r"facts.trained_end_ids\[0\] is a str; expected int"),
        ("facts.tokenizer", [{"engine": "x", "version": "1"}], r"facts.tokenizer\[0\].guard is missing"),
    ],
)
def test_a_manifest_of_impossible_figures_is_refused(write_dataset, place, value, expected):
    path = write_dataset(PACKS, seq_len=64)
    record = json.loads((path / "manifest.json").read_text())
    del record["checksum"]
    edit(record, place, value)
    with pytest.raises(FormatError, match=rf"{expected}.*\(rule F1\)"):
        parse_manifest(seal(record), "manifest.json")


def test_a_sidecar_that_reads_files_which_the_plan_does_not_have_is_refused(write_dataset):
    path = write_dataset(PACKS, seq_len=64)
    file = path / sidecar_name(0)
    record = json.loads(file.read_text())
    del record["checksum"]
    files = len(json.loads((path / "plan.json").read_text())["sources"][0]["files"])
    file.write_bytes(seal(record | {"spans": [[files, 0, 9, 0, 1]]}))
    with pytest.raises(FormatError, match=rf"reads file {files} of source web, of which the plan has {files}.*F5"):
        spans_of(Dataset(path), 0)
