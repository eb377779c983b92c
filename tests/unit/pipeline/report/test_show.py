"""Packs decoded: every token of a pack is shown once, marked as the shard marks it."""

import gzip
import json
import shlex

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from pipeline.cli import main
from pipeline.report.decoding import Decoder
from pipeline.report.show import decode_pack, find_neighbours, pack_view, rows_of_document
from shards import Dataset, PackError
from shards.tables.provenance import parse_document_id


@pytest.fixture
def dataset(tokenizer_dir, tmp_path):
    """Three documents: one of 150 tokens and more, which seq_len 64 cuts, and two short ones with control text."""
    records = [{"text": "one two three " * 60}, {"text": "short </s> é ö"}, {"text": "Ein Satz auf Deutsch: äöü."}]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "dataset"
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(out), "--workers", "1"]
    done = CliRunner().invoke(main, ["build", str(corpus), *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Dataset(out)


def packs(dataset, **options):
    decoder = Decoder(dataset.path / "tokenizer")
    return [decode_pack(dataset, row, decoder, **options) for row in range(len(dataset))]


def test_the_runs_of_a_segment_spell_what_the_tokenizer_decodes(dataset, tokenizer_dir):
    tokenizer = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
    checked = 0
    for row, pack in zip(dataset, packs(dataset), strict=True):
        for segment in pack["segments"]:
            ids = row["input_ids"][segment["start"] : segment["start"] + segment["tokens"]]
            whole = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            assert "".join(run["text"] for run in segment["runs"]) == whole
            assert sum(run["tokens"] for run in segment["runs"]) == segment["tokens"]
            checked += 1
    assert checked >= 4


def test_every_token_is_marked_as_the_loss_mask_marks_it(dataset):
    for row, pack in zip(dataset, packs(dataset), strict=True):
        trained = [
            run["trained"] for segment in pack["segments"] for run in segment["runs"] for _ in range(run["tokens"])
        ]
        assert trained == row["loss_mask"].astype(bool).tolist()
        assert pack["targets"] == sum(trained)


def test_only_the_tokenizers_own_end_of_text_is_special(dataset):
    runs = [run for pack in packs(dataset) for segment in pack["segments"] for run in segment["runs"]]
    assert [run["text"] for run in runs if run["special"]] == ["</s>"] * 3
    assert any("</s>" in run["text"] for run in runs if not run["special"])


def test_a_cut_document_says_where_it_goes_on(dataset):
    parts = [(s["document_offset"], p["row"], s) for p in packs(dataset) for s in p["segments"] if s["document"] == 0]
    parts.sort(key=lambda part: part[0])
    assert len(parts) >= 3
    assert [s["previous_pack"] for _, _, s in parts] == [None, *[row for _, row, _ in parts[:-1]]]
    assert [s["next_pack"] for _, _, s in parts] == [*[row for _, row, _ in parts[1:]], None]
    assert {s["lost_before"] for _, _, s in parts} == {s["lost_after"] for _, _, s in parts} == {0}
    assert rows_of_document(dataset, 0) == list(dict.fromkeys(row for _, row, _ in parts))


def test_lost_tokens_before_between_and_after_parts_are_counted():
    parts = [(10, 5, 0), (20, 5, 3)]  # tokens 10 to 14 in pack 0, 20 to 24 in pack 3, of a document of 40
    first, second = find_neighbours(parts, 10, 40), find_neighbours(parts, 20, 40)
    assert first == {"previous_pack": None, "next_pack": 3, "lost_before": 10, "lost_after": 5}
    assert second == {"previous_pack": 0, "next_pack": None, "lost_before": 5, "lost_after": 15}


def test_a_segment_names_its_file_and_record(dataset):
    records = {s["record"].partition(" of ")[0] for p in packs(dataset) for s in p["segments"]}
    assert records == {f"corpus.jsonl, record {n}" for n in (1, 2, 3)}


def records(path, sources, tokenizer_dir, **environment):
    """Build a dataset and return where its segments say they come from."""
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "256", "--out", str(path), "--workers", "1"]
    done = CliRunner().invoke(main, ["build", *map(str, sources), *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return sorted(s["record"] for p in packs(Dataset(path)) for s in p["segments"])


def test_the_slice_that_a_record_is_counted_in_has_a_unit(tmp_path, tokenizer_dir):
    line = json.dumps({"text": "one two"}) + "\n"
    (tmp_path / "plain.jsonl").write_text(line * 2)
    (tmp_path / "zipped.jsonl.gz").write_bytes(gzip.compress(line.encode() * 2))
    (tmp_path / "array.json").write_text(json.dumps([json.loads(line)] * 2))
    pq.write_table(pa.table({"text": ["one two"] * 2}), tmp_path / "table.parquet")
    datasets.Dataset.from_dict({"text": ["one two"] * 2}).save_to_disk(str(tmp_path / "saved"))
    expected = {
        "plain.jsonl": f"bytes 0:{2 * len(line)}", "zipped.jsonl.gz": "lines 0:2", "array.json": "records 0:2",
        "table.parquet": "row groups 0:1", "saved": "rows 0:2",
    }  # fmt: skip
    for name, slice_ in expected.items():
        found = records(tmp_path / f"{name}.out", [tmp_path / name], tokenizer_dir)
        assert [record.partition(", ")[2] for record in found] == [f"record {n} of {slice_}" for n in (1, 2)]


def test_one_of_each_is_no_plural(write_dataset, tokenizer_dir):
    path = write_dataset({"web": [[2]]}, tokenizer=tokenizer_dir)
    said = CliRunner().invoke(main, ["show", str(path), "--tokens", "1"]).output
    assert "2 tokens, 1 segment, " in said
    assert "… 1 more token\n" in said


def test_a_terminal_does_not_obey_what_a_corpus_says(tmp_path, tokenizer_dir):
    (tmp_path / "evil.jsonl").write_text(json.dumps({"text": "clear \x1b[2J the screen"}))
    records(tmp_path / "out", [tmp_path / "evil.jsonl"], tokenizer_dir)
    assert "␛[2J" in CliRunner().invoke(main, ["show", str(tmp_path / "out")]).output


def test_a_dataset_without_its_tokenizer_is_an_error(write_dataset, tokenizer_dir):
    path = write_dataset({"web": [[2]]}, tokenizer=tokenizer_dir)
    (path / "tokenizer" / "tokenizer.json").unlink()
    done = CliRunner().invoke(main, ["show", str(path)])
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert "tokenizer.json: is missing" in done.output


def test_hints_quote_a_path_with_spaces(write_dataset):
    path = write_dataset({"web": [[2]]}, name="my data")
    said = CliRunner().invoke(main, ["show", str(path), "--doc", "0:9"]).output
    assert shlex.split(said.partition("See ")[2].strip(".\n")) == ["pack", "inspect", str(path)]


def test_what_is_cut_from_the_view_is_counted(dataset):
    for pack in packs(dataset, tokens=5):
        for segment in pack["segments"]:
            shown = sum(run["tokens"] for run in segment["runs"])
            assert shown == min(5, segment["tokens"])
            assert segment["hidden_tokens"] == segment["tokens"] - shown


def test_without_colour_brackets_mark_the_targets(dataset):
    pack = packs(dataset)[0]
    text = "\n".join(line.plain for line in pack_view(pack, colour=False))
    inside = "".join(part.split("⟧")[0] for part in text.split("⟦")[1:])
    assert inside == "".join(run["text"] for s in pack["segments"] for run in s["runs"] if run["trained"])


def test_a_terminal_that_wants_no_colour_gets_brackets(dataset):
    command = ["show", str(dataset.path)]
    assert "⟦" not in CliRunner().invoke(main, command, env={"FORCE_COLOR": "1", "NO_COLOR": None}).output
    assert "⟦" in CliRunner().invoke(main, command, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).output


def test_the_command_finds_documents_and_text(dataset):
    run = CliRunner().invoke
    found = run(main, ["show", str(dataset.path), "--doc", "0:2", "--json"])
    assert [json.loads(line)["segments"] for line in found.output.splitlines()]
    assert "auf Deutsch" in run(main, ["show", str(dataset.path), "--grep", "Ein Satz"]).output
    missing = run(main, ["show", str(dataset.path), "--grep", "nowhere"])
    assert (missing.exit_code, missing.output.count("\n")) == (1, 1)
    assert run(main, ["show", str(dataset.path), "--doc", "0:9"]).exit_code == 1
    assert "no pack 99" in run(main, ["show", str(dataset.path), "99"]).output


def test_documents_are_named_by_number_or_by_window_and_record():
    assert parse_document_id("3:17") == 3 * 2**32 + 17
    assert parse_document_id("12") == 12
    with pytest.raises(PackError, match="expected its doc_id, or window:record"):
        parse_document_id("a:b")


def test_an_empty_mask_and_a_whole_one_are_shown(write_dataset, tokenizer_dir):
    dataset = Dataset(write_dataset({"web": [[1], [9, 8]]}, tokenizer=tokenizer_dir))
    pack = decode_pack(dataset, 0, Decoder(dataset.path / "tokenizer"))
    assert [run["trained"] for run in pack["segments"][0]["runs"]] == [False]
    assert np.isclose(pack["fill"], 1 / 64)
