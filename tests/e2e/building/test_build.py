"""`pack build` from real files to a verified dataset."""

import gzip
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline import PACKERS, BuildConfig, RecordOptions, build
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
