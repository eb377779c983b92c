"""`pack build` from real files to a verified dataset, and what it says when it cannot."""

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline import PACKERS, BuildConfig, RecordOptions, build
from pipeline.cli import main
from pipeline.config import PACKER_NAMES
from shards import Dataset, PackError, verify

EOS = 1


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def corpus(number: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "packing", "documents", "into", "rows"]
    return [f"{k}: " + " ".join(rng.choices(words, k=min(int(rng.lognormvariate(3, 1)), 400))) for k in range(number)]


def config(path: Path, tokenizer: str, out: Path, **options) -> BuildConfig:
    return BuildConfig(sources=(str(path),), out=str(out), tokenizer=tokenizer, **({"seq_len": 128} | options))


def documents_of(dataset: Dataset) -> dict[int, list[tuple[int, list[int], list[int]]]]:
    """Offset, ids and mask of every packed piece, by document."""
    pieces: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    for row in dataset:
        bounds = row["cu_seqlens"].tolist()
        for k, document in enumerate(row["doc_ids"].tolist()):
            piece = slice(bounds[k], bounds[k + 1])
            entry = (int(row["doc_offsets"][k]), row["input_ids"][piece].tolist(), row["loss_mask"][piece].tolist())
            pieces.setdefault(document, []).append(entry)
            assert row["position_ids"][piece].tolist() == list(range(bounds[k + 1] - bounds[k]))
    return {document: sorted(found) for document, found in pieces.items()}


def joined(pieces: list[tuple[int, list[int], list[int]]]) -> list[int]:
    return [token for _, ids, _ in pieces for token in ids]


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.arrow"))}


def test_the_command_line_offers_every_packer():
    assert tuple(PACKERS) == PACKER_NAMES


@pytest.mark.parametrize("packer", PACKER_NAMES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=200), min_size=1, max_size=30),
    seq_len=st.integers(2, 64),
)
def test_every_token_of_every_document_is_packed_once_in_order(tmp_path_factory, tokenizer_dir, packer, texts, seq_len):
    directory = tmp_path_factory.mktemp("round")
    texts = [*texts, "one document that is never empty"]
    path = write_jsonl(directory / "corpus.jsonl", texts)
    build(config(path, tokenizer_dir, directory / "out", packer=packer, seq_len=seq_len))
    dataset = Dataset(directory / "out")
    tokenizer = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
    tokenizer.encode_special_tokens = True
    found = documents_of(dataset)
    expected = {k: [*tokenizer.encode(text).ids, EOS] for k, text in enumerate(texts) if text}
    assert {k: joined(pieces) for k, pieces in found.items()} == expected
    for pieces in found.values():
        place = 0
        for offset, ids, mask in pieces:
            assert offset == place
            assert mask == [0] + [1] * (len(ids) - 1)
            place += len(ids)
    if packer == "wrapped":
        assert (dataset.index.num_tokens[:-1] == seq_len).all()
    report = verify(directory / "out")
    assert report.ok, report.problems
    assert report.tokens_checked == sum(map(len, expected.values()))


def test_the_balance_sheet_counts_every_document_and_token(tmp_path, tokenizer_dir):
    texts = ["a b c d e f g h i j k l m n o p", "", "x y", "q " * 100]
    path = write_jsonl(tmp_path / "c.jsonl", texts)
    totals = {}
    for policy in ("split", "truncate", "drop"):
        out = tmp_path / policy
        manifest = build(config(path, tokenizer_dir, out, seq_len=40, records=RecordOptions(overlong=policy))).manifest
        totals[policy] = manifest["totals"]
        assert verify(out).ok
    tokenizer = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
    lengths = [len(tokenizer.encode(text).ids) + 1 for text in texts if text]
    assert max(lengths) > 40
    for sheet in totals.values():
        assert sheet["documents"]["read"] == 4
        assert sheet["documents"]["dropped"]["empty"] == 1
        assert sheet["tokens"]["read"] == sum(lengths)
        assert sheet["targets"]["read"] == sum(lengths) - 3
    pieces = -(-lengths[2] // 40)
    assert totals["split"]["tokens"] == {"read": sum(lengths), "packed": sum(lengths), "lost": {}}
    assert totals["split"]["targets"]["lost"] == {"boundary": pieces - 1}
    assert totals["split"]["documents"]["split"] == 1
    assert totals["truncate"]["tokens"]["lost"] == {"truncated": lengths[2] - 40}
    assert totals["truncate"]["documents"]["truncated"] == 1
    assert totals["drop"]["tokens"]["lost"] == {"overlong": lengths[2]}
    assert totals["drop"]["documents"]["dropped"] == {"empty": 1, "overlong": 1}


def test_overlong_error_names_the_record(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["short", "q " * 100])
    with pytest.raises(PackError, match=r"c\.jsonl, line 2: has \d+ tokens; expected at most 40"):
        build(config(path, tokenizer_dir, tmp_path / "out", seq_len=40, records=RecordOptions(overlong="error")))


def test_the_same_command_twice_gives_the_same_bytes_and_id(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(300))
    first = build(config(path, tokenizer_dir, tmp_path / "a", window_bytes=8192)).manifest
    second = build(config(path, tokenizer_dir, tmp_path / "b", window_bytes=8192)).manifest
    assert first["dataset_id"] == second["dataset_id"]
    assert first["shards"]["rows"] > 3
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_another_seed_tokenizer_or_corpus_gives_another_id_but_a_move_does_not(
    tmp_path, tokenizer_dir, other_tokenizer_dir
):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(50))
    ids = [build(config(path, tokenizer_dir, tmp_path / "a")).manifest["dataset_id"]]
    ids.append(build(config(path, tokenizer_dir, tmp_path / "b", seed=1)).manifest["dataset_id"])
    ids.append(build(config(path, other_tokenizer_dir, tmp_path / "c")).manifest["dataset_id"])
    (tmp_path / "moved").mkdir()
    os.rename(path, tmp_path / "moved" / "c.jsonl")
    moved = build(config(tmp_path / "moved" / "c.jsonl", tokenizer_dir, tmp_path / "d")).manifest["dataset_id"]
    assert moved == ids[0]
    path = write_jsonl(tmp_path / "c.jsonl", [*corpus(49), "changed"])
    ids.append(build(config(path, tokenizer_dir, tmp_path / "e")).manifest["dataset_id"])
    assert len(set(ids)) == 4


@pytest.mark.parametrize("workers", [2, 7])
def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path, tokenizer_dir, workers):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(200))
    one = build(config(path, tokenizer_dir, tmp_path / "one", window_bytes=4096)).manifest
    many = build(config(path, tokenizer_dir, tmp_path / "many", window_bytes=4096, workers=workers)).manifest
    assert one["dataset_id"] == many["dataset_id"]
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_a_compressed_file_gives_the_same_documents(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(100))
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    build(config(path, tokenizer_dir, tmp_path / "plain"))
    build(config(packed, tokenizer_dir, tmp_path / "gz", window_bytes=4096))
    assert len(Dataset(tmp_path / "gz").shards) > 1
    plain, gz = (
        sorted(joined(pieces) for pieces in documents_of(Dataset(tmp_path / name)).values()) for name in ("plain", "gz")
    )
    assert plain == gz
    assert verify(tmp_path / "gz").ok


def test_position_ids_that_are_not_stored_are_derived(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(50))
    build(config(path, tokenizer_dir, tmp_path / "with"))
    build(config(path, tokenizer_dir, tmp_path / "without", position_ids=False))
    stored, derived = Dataset(tmp_path / "with"), Dataset(tmp_path / "without")
    assert len(stored) == len(derived) > 3
    for left, right in zip(stored, derived, strict=True):
        assert np.array_equal(left["position_ids"], right["position_ids"])
    assert verify(tmp_path / "without").ok


def test_datasets_opens_the_result_mapped_with_equal_columns(tmp_path, tokenizer_dir, monkeypatch):
    import datasets
    import pyarrow as pa

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    path = write_jsonl(tmp_path / "c.jsonl", corpus(200))
    build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=8192))
    ours = Dataset(tmp_path / "out")
    before = pa.total_allocated_bytes()
    theirs = datasets.load_from_disk(str(tmp_path / "out"))
    assert pa.total_allocated_bytes() - before < 4096
    assert {Path(file["filename"]).parent for file in theirs.cache_files} == {tmp_path / "out" / "shards"}
    assert not list((tmp_path).rglob("cache-*"))
    assert theirs.num_rows == len(ours) > 3
    for left, right in zip(ours, theirs, strict=True):
        values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in left.items()}
        mask = values.pop("loss_mask")  # not stored: all but the first token of each segment
        assert [place for place, target in enumerate(mask) if not target] == values["cu_seqlens"][:-1]
        assert values == right


def test_a_finished_build_is_not_done_again_and_another_plan_is_refused_by_name(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(50))
    first = build(config(path, tokenizer_dir, tmp_path / "out")).manifest
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}
    again = build(config(path, tokenizer_dir, tmp_path / "out")).manifest
    assert again["dataset_id"] == first["dataset_id"]
    assert times == {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}
    with pytest.raises(PackError, match=r"another build: seq_len 128 there, 64 here\. Choose another `out`"):
        build(config(path, tokenizer_dir, tmp_path / "out", seq_len=64))
    replaced = build(config(path, tokenizer_dir, tmp_path / "out", seq_len=64, overwrite=True)).manifest
    assert replaced["seq_len"] == 64
    assert verify(tmp_path / "out").ok


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(5))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(PackError, match=r"holds something else \(thesis.tex\)"):
            build(config(path, tokenizer_dir, tmp_path / "out", overwrite=overwrite))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_an_interrupted_build_resumes_to_the_same_bytes(tmp_path, tokenizer_dir, monkeypatch):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(200))
    clean = build(config(path, tokenizer_dir, tmp_path / "clean", window_bytes=4096)).manifest
    calls = []
    import pipeline.building.engines

    real = pipeline.building.engines.run_window

    def fail_at_third(*args):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(pipeline.building.engines, "run_window", fail_at_third)
    with pytest.raises(PackError, match=r"no space left \(No space .*; the windows that are done are kept"):
        build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096))
    with pytest.raises(PackError, match="holds an unfinished build"):
        Dataset(tmp_path / "out")
    with pytest.raises(PackError, match="Add `resume=True`"):
        build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096))
    calls.clear()
    monkeypatch.setattr(pipeline.building.engines, "run_window", lambda *args: calls.append(1) or real(*args))
    resumed = build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096, resume=True)).manifest
    assert len(calls) == clean["shards"]["rows"] - 2
    assert resumed["dataset_id"] == clean["dataset_id"]
    assert files_of(tmp_path / "clean") == files_of(tmp_path / "out")
    assert verify(tmp_path / "out").ok


def test_parts_of_a_job_array_make_the_same_dataset(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(200))
    clean = build(config(path, tokenizer_dir, tmp_path / "clean", window_bytes=4096)).manifest
    parts = [
        build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096, windows=f"{k}::3")) for k in (2, 0, 1)
    ]
    assert parts[0].unfinished > parts[1].unfinished > parts[2].unfinished == 0
    assert parts[0].manifest is None
    assert parts[2].manifest["dataset_id"] == clean["dataset_id"]
    assert files_of(tmp_path / "clean") == files_of(tmp_path / "out")


def test_finalize_names_the_window_that_is_missing(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(200))
    build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096, windows="1::2"))
    with pytest.raises(PackError, match=r"window 0 of .* is missing"):
        build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096, finalize=True))
    build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096, windows="0::2"))
    assert verify(tmp_path / "out").ok


def test_parts_of_a_build_are_refused_before_anything_is_written_where_they_cannot_work(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(10))
    flags = ["build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out")]
    assert "expected i::n" in run(*flags, "--windows", "3").stderr
    assert "expected i::n" in run(*flags, "--windows", "3::3").stderr
    for part in (["--windows", "0::2"], ["--finalize"]):
        assert "would remove what other parts wrote" in run(*flags, "--overwrite", *part).stderr
    assert not (tmp_path / "out").exists()
    build(config(path, tokenizer_dir, tmp_path / "out"))
    other = run(*flags, "--window-bytes", "1KB", "--windows", "0::2")
    assert "another build: seq_len 128 there, 64 here. Choose another --out, remove what is there" in other.stderr


def test_fields_of_two_kinds_of_records_are_named(tmp_path, tokenizer_dir):
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out")]
    result = run("build", "c.jsonl", *flags, "--text-field", "a", "--messages-field", "b")
    assert "messages_field and text_field belong to records of different kinds" in result.stderr


def test_text_that_looks_like_a_control_token_stays_text(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["say </s> or <|im_start|>system now"])
    build(config(path, tokenizer_dir, tmp_path / "plain"))
    build(config(path, tokenizer_dir, tmp_path / "parsed", records=RecordOptions(parse_special=True)))
    plain, parsed = (Dataset(tmp_path / name)[0]["input_ids"].tolist() for name in ("plain", "parsed"))
    assert [token for token in plain[:-1] if token < 5] == []
    assert [token for token in parsed[:-1] if token < 5] == [1, 3]


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


BAD_LINES = {
    "missing field": (b'{"txt": "x"}\n', "text"),
    "wrong type": (b'{"text": 7}\n', "text"),
    "null": (b'{"text": null}\n', "text"),
    "line cut in half": (b'{"text": "abc\n', "line 2"),
    "invalid UTF-8": (b'{"text": "\xff"}\n', "UTF-8"),
    "lone surrogate": (b'{"text": "\\ud800"}\n', "surrogate"),
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_a_bad_record_is_one_line_and_leaves_no_dataset(tmp_path, tokenizer_dir, fault):
    line, word = BAD_LINES[fault]
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'{"text": "good"}\n')
    arguments = ("build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out"))
    result = run(*arguments)
    assert result.exit_code == 1
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("compiling")]
    assert [line[:7] for line in lines] == ["Error: "]
    assert "c.jsonl" in result.stderr
    assert word.lower() in result.stderr.lower()
    assert run("verify", str(tmp_path / "out")).exit_code == 1
    skipped = run(*arguments, "--resume", "--on-error", "skip", "--max-rejected", "0.5")
    assert skipped.exit_code == 0, skipped.output
    manifest = Dataset(tmp_path / "out").manifest
    assert manifest["totals"]["documents"] == {
        "read": 3, "packed": 2, "split": 0, "truncated": 0, "dropped": {"rejected": 1}
    }  # fmt: skip
    rejected = [json.loads(entry) for entry in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert len(rejected) == 1
    assert "c.jsonl" in rejected[0]["where"]
    assert verify(tmp_path / "out").ok


def test_numbers_and_nouns_agree_and_commands_can_be_pasted(tmp_path, tokenizer_dir):
    path, out = write_jsonl(tmp_path / "c.jsonl", ["x y z"]), str(tmp_path / "my data")
    built = run("build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", out, "--workers", "1")
    assert f"{out}: 1 document, " in built.stdout
    assert " in 1 pack of 64" in built.stdout
    assert f"pack inspect '{out}'" in built.stdout
    assert "1 shard, 1 pack, " in run("verify", out).stdout
    write_jsonl(path, [""])
    with pytest.raises(PackError, match=r"no document to pack \(1 record read: empty 1\)"):
        build(config(path, tokenizer_dir, tmp_path / "none"))


def test_a_tilde_behind_an_equals_sign_is_the_home_directory(tmp_path, tokenizer_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    done = run("build", "web=~/c.jsonl", "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out=~/out", "--workers=1")
    assert done.exit_code == 0, done.output
    assert verify(tmp_path / "out").ok


def test_too_many_bad_records_stop_the_build(tmp_path, tokenizer_dir):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 3 + b"{}\n")
    with pytest.raises(PackError, match=r"1 bad of 4 records, more than `max_rejected` 0\.01"):
        build(config(path, tokenizer_dir, tmp_path / "out", on_error="skip"))


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty file"), (b"\n\n", "no document"), (b'{"text": ""}\n', "no document")]
)
def test_a_corpus_without_documents_is_an_error(tmp_path, tokenizer_dir, content, message):
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    result = run("build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_corpus_of_documents_that_are_all_too_long_says_what_to_do(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["a long text of many words"] * 3)
    with pytest.raises(PackError, match=r"no document to pack \(3 records read: overlong 3\).* Raise `seq_len`, or"):
        build(config(path, tokenizer_dir, tmp_path / "out", seq_len=4, records=RecordOptions(overlong="drop")))


def test_an_unknown_tokenizer_or_source_is_one_line(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    for source, tokenizer in ((path, tmp_path / "no"), (tmp_path / "no.jsonl", tokenizer_dir)):
        result = run(
            "build", str(source), "--tokenizer", str(tokenizer), "--seq-len", "9", "--out", str(tmp_path / "o")
        )
        assert result.exit_code == 1
        assert "no" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "chat"}, "the tokenizer has no chat template; expected one for conversations"),
        ({"kind": "chat", "train_on": "completion"}, "--train-on completion: a conversation has no completion"),
        ({"kind": "text", "train_on": "assistant"}, "--train-on assistant: plain text has no roles"),
    ],
)
def test_options_that_fit_no_record_are_refused_before_anything_is_written(
    tmp_path, bos_tokenizer_dir, options, message
):
    (tmp_path / "c.jsonl").write_text("\n")
    wanted = config(tmp_path / "c.jsonl", bos_tokenizer_dir, tmp_path / "out", records=RecordOptions(**options))
    with pytest.raises(PackError, match=message):
        build(wanted)
    assert not (tmp_path / "out").exists()


def test_an_output_directory_that_cannot_be_made_is_one_line(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    (tmp_path / "file").write_text("in the way")
    result = run(
        "build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "9", "--out", str(tmp_path / "file" / "o")
    )
    assert result.exit_code == 1
    assert "is a file, or lies in one; expected a directory. Choose another --out." in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_wrong_flags_are_usage_errors(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    common = ("build", str(path), "--tokenizer", tokenizer_dir, "--out", str(tmp_path / "o"))
    assert run(*common).exit_code == 2
    assert run(*common, "--seq-len", "many").exit_code == 2
    assert run(*common, "--seq-len", "9", "--window-bytes", "lots").exit_code == 2
    assert run(*common, "--seq-len", "1").exit_code == 1


def test_verify_against_the_sources_finds_every_document_or_names_the_first_that_is_not(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", corpus(100))
    build(config(path, tokenizer_dir, tmp_path / "out", window_bytes=4096))
    found = run("verify", str(tmp_path / "out"), "--against", str(path))
    assert found.exit_code == 0, found.output
    assert "100 documents" in found.output
    other = write_jsonl(tmp_path / "other.jsonl", corpus(100, seed=1))
    wrong = run("verify", str(tmp_path / "out"), "--against", str(other))
    assert wrong.exit_code == 1
    assert "F2" in wrong.stderr


def test_a_build_that_failed_before_it_wrote_anything_leaves_room_for_the_mended_command(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"] * 9)
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "9", "--out", str(tmp_path / "o"), "--workers", "1"]
    assert run("build", str(path), *flags, "--text-field", "body").exit_code == 1
    with path.open("a") as file:
        file.write("{}\n")
    assert "line 10" in run("build", str(path), *flags).stderr
    assert run("build", str(path), *flags, "--on-error", "skip", "--max-rejected", "0.2").exit_code == 0
    other = run("build", str(path), *flags, "--seed", "1")
    assert other.exit_code == 1
    assert "another build: seed 0 there, 1 here" in other.stderr


def test_the_speed_after_a_resumed_build_counts_what_that_run_read(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "c.jsonl", [f"{number} x y z" for number in range(400)])
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "o"), "--workers", "1"]
    flags += ["--window-bytes", "2KB"]
    whole = json.loads(run("build", str(path), *flags, "--json").stdout)
    tokens = whole["totals"]["tokens"]["read"]
    assert whole["facts"]["tokens_read"] == tokens
    next((tmp_path / "o" / "shards").glob("00000001-*.arrow")).unlink()
    rest = json.loads(run("build", str(path), *flags, "--json", "--resume").stdout)
    assert 0 < rest["facts"]["tokens_read"] < tokens / 2
    assert f"for the last {rest['facts']['tokens_read']:,} tokens" in run("inspect", str(tmp_path / "o")).stdout


def test_files_of_a_directory_that_are_left_out_are_named(tmp_path, tokenizer_dir):
    write_jsonl(tmp_path / "a.jsonl", ["x y z"])
    (tmp_path / "b.png").write_bytes(b"x")
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "9", "--out", str(tmp_path / "o"), "--workers", "1"]
    assert "source 'corpus': files left out: 1 .png" in run("build", str(tmp_path), *flags).stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq-len", "3000000000"], "--seq-len: 3,000,000,000; expected 2 to 16,777,216 tokens."),
        (["--workers", "0"], "--workers: 0; expected at least 1."),
        (["--max-rejected", "2"], "--max-rejected: 2; expected a share from 0 to 1, such as 0.01."),
    ],
)
def test_a_flag_out_of_range_is_one_line(tmp_path, tokenizer_dir, flags, message):
    path = write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    result = run(
        "build", str(path), "--tokenizer", tokenizer_dir, "--seq-len", "9", "--out", str(tmp_path / "o"), *flags
    )
    assert result.stderr == f"Error: {message}\n"


@pytest.mark.parametrize("policy", ["truncate", "truncate-turns", "drop", "error"])
def test_wrapped_refuses_a_policy_for_long_documents_that_it_would_not_heed(tmp_path, tokenizer_dir, policy):
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "assistant", "content": "one two"}]}\n' * 9)
    chat = RecordOptions(kind="chat", overlong=policy)
    for options in ({"records": chat}, {"source_records": {"corpus": chat}}):
        with pytest.raises(
            PackError, match=rf'`overlong="{policy}"`: `packer="wrapped"` cuts every document where a row'
        ):
            build(config(tmp_path / "c.jsonl", tokenizer_dir, tmp_path / "out", packer="wrapped", **options))
    assert not (tmp_path / "out").exists()
    for allowed in ("auto", "split"):
        options = {"records": RecordOptions(kind="chat", overlong=allowed), "seq_len": 8}
        built = build(
            config(tmp_path / "c.jsonl", tokenizer_dir, tmp_path / allowed, packer="wrapped", **options)
        ).manifest
        assert built["totals"]["documents"]["packed"] == 9


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", ["build", "inspect", "inspect --json", "show", "verify", "--help"])
def test_an_output_that_cannot_be_written_is_one_line(tmp_path, tokenizer_dir, command):
    path, out = write_jsonl(tmp_path / "c.jsonl", corpus(60)), tmp_path / "out"
    name, *flags = command.split()
    flags.append(str(path if name == "build" else out))
    if name == "build":
        flags += ["--tokenizer", tokenizer_dir, "--seq-len", "128", "--out", str(out), "--workers", "1"]
    else:
        build(config(path, tokenizer_dir, out))
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "pipeline", name, *flags], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert process.returncode == 1
    lines = [line for line in process.stderr.splitlines() if not line.startswith("compiling")]
    assert lines == [
        "Error: stdout: cannot be written (No space left on device); what the command made is kept. "
        "Send the output elsewhere."
    ]
    assert verify(out).ok


def test_an_empty_out_or_source_is_named(tmp_path, tokenizer_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "c.jsonl", ["x y z"])
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "9", "--workers", "1"]
    no_out = run("build", "c.jsonl", *flags, "--out", "")
    assert no_out.stderr == (
        "Error: --out: is an empty string; expected a directory or an fsspec URL. Is a shell variable unset?\n"
    )
    no_source = run("build", "c.jsonl", "", *flags, "--out", "o")
    assert no_source.stderr == (
        "Error: SOURCE is an empty string; expected a file, directory, dataset or URL. Is a shell variable unset?\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_build_says_once_what_is_spelled_like_control_text_and_that_dropout_is_off(tmp_path, tokenizer_dir):
    noisy = Path(shutil.copytree(tokenizer_dir, tmp_path / "noisy"))
    parsed = json.loads((noisy / "tokenizer.json").read_text("utf-8"))
    parsed["model"]["dropout"] = 0.25
    (noisy / "tokenizer.json").write_text(json.dumps(parsed), "utf-8")
    texts = ["plain text", "how a turn ends: <|im_end|>", "see </s>", "nothing here"] * 3
    path = write_jsonl(tmp_path / "c.jsonl", texts)
    arguments = ("build", str(path), "--tokenizer", str(noisy), "--seq-len", "64", "--window-bytes", "100")
    result = run(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    said = [line for line in result.stdout.splitlines() if line.startswith("control text: ")]
    assert said == [
        "control text: 6 texts spell control tokens, such as '<|im_end|>'; it was kept as text "
        "(--parse-special reads it as control tokens)"
    ]
    assert result.stderr.count("BPE dropout of 0.25 is switched off") == 1
    facts = Dataset(tmp_path / "out").manifest["facts"]
    assert facts["spelled_controls"] == {"texts": 6, "example": "<|im_end|>"}
    assert len(Dataset(tmp_path / "out").manifest["shards"]) > 1
    again = run(*arguments, "--out", str(tmp_path / "again"))
    assert again.exit_code == 0, again.output
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")
    special = run(*arguments, "--parse-special", "--out", str(tmp_path / "special"))
    assert "control text" not in special.stdout
