"""Hold-outs, drop lists and duplicates: against sets worked out from tokens by the definition, in both commands."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from click.testing import CliRunner

from pipeline import BuildConfig, RecordOptions, RepackConfig, build, repack
from pipeline.building.audit import audit_sources
from pipeline.building.driver import BuildResult
from pipeline.building.repacking import repack as repacking
from pipeline.cli import main
from shards import Dataset, verify
from shards.errors import PackError
from shards.plan import corpus_id
from shards.publish import seal
from shards.verification import VerifyReport

SEQ_LEN = 48


def write_corpus(path: Path, number: int, seed: int = 0) -> Path:
    """Write texts of 4 to 120 words, a third of which are copies of earlier ones; some in a second file."""
    rng = np.random.default_rng(seed)
    texts: list[str] = []
    for k in range(number):
        fresh = f"{seed} document {k}: " + "some words " * int(rng.integers(0, 60))
        texts.append(texts[int(rng.integers(0, k))] if k and rng.random() < 0.33 else fresh)
    path.mkdir()
    half = number // 2
    for name, part in (("a", texts[:half]), ("b", texts[half:])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("selected") / "corpus", 240)


def settings(corpus: Path, tokenizer_dir: str, **changes: Any) -> dict[str, Any]:
    return {
        "sources": corpus, "tokenizer": tokenizer_dir, "seq_len": SEQ_LEN, "window_bytes": 4096,
        "tokenizer_engine": "tokenizers", **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(corpus: Path, tokenizer_dir: str) -> Dataset:
    out = corpus.parent / "whole"
    build(BuildConfig(out=out, **settings(corpus, tokenizer_dir)))
    assert len(Dataset(out).shards) > 4
    return Dataset(out)


def documents(dataset: Dataset) -> dict[int, tuple[int, ...]]:
    """Tokens of each record, put together from its segments by their offsets."""
    pieces: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
    for row in dataset:
        bounds = row["cu_seqlens"].tolist()
        columns = (row["doc_ids"].tolist(), row["doc_parts"].tolist(), row["doc_offsets"].tolist())
        for place, (number, part, offset) in enumerate(zip(*columns, strict=True)):
            ids = tuple(row["input_ids"][bounds[place] : bounds[place + 1]].tolist())
            pieces.setdefault(number, []).append((part, offset, ids))
    return {number: tuple(token for *_, ids in sorted(found) for token in ids) for number, found in pieces.items()}


def is_held_out(ids: tuple[int, ...], share: float, seed: int = 0) -> bool:
    digest = xxhash.xxh3_128_intdigest(b"".join(token.to_bytes(4, "little") for token in ids), seed)
    return digest / 2**128 < share


def firsts(found: dict[int, tuple[int, ...]]) -> set[int]:
    """Return the records whose tokens no earlier record has."""
    seen: dict[tuple[int, ...], int] = {}
    for number in sorted(found):
        seen.setdefault(found[number], number)
    return set(seen.values())


def sheets(dataset: Dataset) -> dict[str, dict[str, int]]:
    totals = dataset.manifest["totals"]
    return {"documents": totals["documents"]["dropped"], "tokens": totals["tokens"]["lost"]}


@pytest.mark.parametrize("command", ["build", "repack"])
def test_a_holdout_is_the_records_whose_digest_is_below_its_share(command, corpus, whole, tokenizer_dir, tmp_path):
    out = tmp_path / "out"
    if command == "build":
        result = build(BuildConfig(out=out, holdout=0.2, **settings(corpus, tokenizer_dir)))
    else:
        result = repack(RepackConfig(dataset=whole.path, out=out, holdout=0.2))
    rest, held_out, every = Dataset(out), Dataset(f"{out}-holdout"), documents(whole)
    expected = {number for number, ids in every.items() if is_held_out(ids, 0.2)}
    assert 10 < len(expected) < len(every) / 2
    assert documents(held_out) == {number: every[number] for number in expected}
    assert documents(rest) == {number: ids for number, ids in every.items() if number not in expected}
    assert result.holdout is not None
    assert (str(result.path), str(result.holdout.path)) == (str(out), f"{out}-holdout")
    assert sheets(rest)["documents"] == {"held_out": len(expected)}
    assert sheets(held_out)["documents"] == {"not_held_out": len(every) - len(expected)}
    assert sheets(rest)["tokens"] == {"held_out": sum(len(every[number]) for number in expected)}
    for dataset in (rest, held_out):
        report = verify(dataset.path)
        audit_sources(str(dataset.path), (str(corpus),), report)
        assert report.ok, report.problems


def test_an_audit_finds_a_document_that_nobody_set_aside(corpus, whole, tmp_path):
    every = documents(whole)
    short = [number for number, ids in every.items() if len(ids) <= SEQ_LEN]
    (tmp_path / "drop").write_text("".join(f"{number}\n" for number in short))
    repack(RepackConfig(dataset=whole.path, out=tmp_path / "out", drop=tmp_path / "drop"))
    sidecars = (tmp_path / "out" / "shards").glob("*.json")
    sidecar = next(file for file in sidecars if '"listed"' in file.read_text())
    content = json.loads(sidecar.read_text())
    del content["checksum"]
    content["counts"]["documents"]["dropped"]["listed"] -= 1
    sidecar.write_bytes(seal(content))
    report = VerifyReport(path=str(tmp_path / "out"), level="full")
    audit_sources(str(tmp_path / "out"), (str(corpus),), report)
    assert ["is not packed" in problem.message for problem in report.problems] == [True]


def test_both_commands_write_the_same_datasets(corpus, whole, tokenizer_dir, tmp_path):
    chosen = {"holdout": 0.1, "dedup": "exact"}
    built = build(BuildConfig(out=tmp_path / "built", **chosen, **settings(corpus, tokenizer_dir)))
    repacked = repack(RepackConfig(dataset=whole.path, out=tmp_path / "repacked", **chosen))
    for left, right in ((built, repacked), (built.holdout, repacked.holdout)):
        assert left.manifest["dataset_id"] == right.manifest["dataset_id"] != whole.dataset_id
    assert not (tmp_path / "built" / "_tmp").exists()


def test_a_corpus_that_grows_keeps_its_records_on_their_sides(corpus, whole, tokenizer_dir, tmp_path):
    grown = write_corpus(tmp_path / "grown", 60, seed=9)
    for name in ("a", "b"):
        (grown / f"x{name}.jsonl").write_bytes((corpus / f"{name}.jsonl").read_bytes())
    build(BuildConfig(out=tmp_path / "out", holdout=0.2, **settings(grown, tokenizer_dir)))
    for path, side in ((tmp_path / "out", False), (tmp_path / "out-holdout", True)):
        there = set(documents(Dataset(path)).values())
        old = {ids for ids in documents(whole).values() if is_held_out(ids, 0.2) is side}
        assert old <= there


def test_of_equal_records_the_first_stays(corpus, whole, tokenizer_dir, tmp_path):
    every = documents(whole)
    expected = firsts(every)
    assert len(expected) < len(every) - 40
    repack(RepackConfig(dataset=whole.path, out=tmp_path / "out", dedup="exact"))
    kept = Dataset(tmp_path / "out")
    assert set(documents(kept)) == expected
    assert sheets(kept)["documents"] == {"duplicate": len(every) - len(expected)}


def test_the_list_comes_first_and_duplicates_before_the_holdout(corpus, whole, tmp_path):
    every = documents(whole)
    repeated = next(number for number in sorted(firsts(every)) if list(every.values()).count(every[number]) > 1)
    (tmp_path / "drop.txt").write_text(f"{repeated}\n")
    repack(
        RepackConfig(
            dataset=whole.path, out=tmp_path / "out", drop=tmp_path / "drop.txt", dedup="exact", holdout=0.3
        )
    )  # fmt: skip
    left = {number: ids for number, ids in every.items() if number != repeated}
    left = {number: left[number] for number in firsts(left)}
    assert every[repeated] in left.values()  # the second copy is the first one now
    for path, side in ((tmp_path / "out", False), (tmp_path / "out-holdout", True)):
        assert documents(Dataset(path)) == {n: ids for n, ids in left.items() if is_held_out(ids, 0.3) is side}


def test_a_second_holdout_goes_by_another_digest(whole, tmp_path):
    repack(RepackConfig(dataset=whole.path, out=tmp_path / "one", holdout=0.5))
    repack(RepackConfig(dataset=tmp_path / "one-holdout", out=tmp_path / "two", holdout=0.5))
    expected = {n: ids for n, ids in documents(whole).items() if is_held_out(ids, 0.5) and is_held_out(ids, 0.5, 1)}
    assert documents(Dataset(tmp_path / "two-holdout")) == expected
    assert [entry["holdout"]["side"] for entry in Dataset(tmp_path / "two").plan["select"]] == ["held_out", "rest"]


@pytest.mark.parametrize("form", ["text", "jsonl", "parquet"])
def test_a_list_may_have_any_form(whole, tmp_path, form):
    wanted = sorted(documents(whole))[3:40:4]
    path = tmp_path / {"text": "ids", "jsonl": "ids.jsonl", "parquet": "ids.parquet"}[form]
    if form == "text":
        names = [f"{number >> 32}:{number & 0xFFFFFFFF}" if k % 2 else str(number) for k, number in enumerate(wanted)]
        path.write_text("\n".join(reversed(names)) + "\n")
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"doc_id": number}) + "\n" for number in wanted))
    else:
        pq.write_table(pa.table({"doc_id": wanted}), path)
    result = repack(RepackConfig(dataset=whole.path, out=tmp_path / "out", drop=path))
    assert set(documents(Dataset(tmp_path / "out"))) == set(documents(whole)) - set(wanted)
    assert result.manifest["totals"]["documents"]["dropped"] == {"listed": len(wanted)}
    digest = Dataset(tmp_path / "out").plan["select"][0]["drop"]["digest"]
    assert digest == xxhash.xxh3_128_hexdigest(np.array([[n, -1] for n in wanted], "<i8").tobytes())


def test_rows_of_a_table_count_by_a_condition(whole, tmp_path):
    wanted = sorted(documents(whole))
    losses = [None if k % 7 == 0 else k % 5 + 0.5 for k in range(len(wanted))]
    pq.write_table(pa.table({"doc_id": wanted, "doc_part": [0] * len(wanted), "loss": losses}), tmp_path / "s.parquet")
    config = {"dataset": whole.path, "drop": tmp_path / "s.parquet"}
    repack(RepackConfig(out=tmp_path / "out", drop_where="loss > 3.4", **config))
    gone = {number for number, loss in zip(wanted, losses, strict=True) if loss is not None and loss > 3.4}
    assert set(documents(Dataset(tmp_path / "out"))) == set(wanted) - gone
    with pytest.raises(PackError, match=r"more columns than documents \(loss\).*Add `drop_where`, such as 'loss > 6'"):
        repack(RepackConfig(out=tmp_path / "other", **config))
    for condition in ("loss >", "lost > 3", "loss ~ 3"):
        with pytest.raises(PackError, match="expected COLUMN OPERATOR VALUE"):
            repack(RepackConfig(out=tmp_path / "other", drop_where=condition, **config))
    with pytest.raises(PackError, match=r"loss of .* holds double; expected a value to compare with"):
        repack(RepackConfig(out=tmp_path / "other", drop_where="loss > high", **config))


def test_scores_of_another_corpus_are_refused_and_those_of_other_packs_are_taken(whole, tokenizer_dir, tmp_path):
    repack(RepackConfig(dataset=whole.path, out=tmp_path / "longer", seq_len=2 * SEQ_LEN))
    other = write_corpus(tmp_path / "corpus", 30, seed=4)
    build(BuildConfig(out=tmp_path / "other", **settings(other, tokenizer_dir)))
    wanted = sorted(documents(whole))[:2]
    table = pa.table({"doc_id": wanted}).replace_schema_metadata({"corpus_id": corpus_id(whole.plan)})
    pq.write_table(table, tmp_path / "scores.parquet")
    repack(RepackConfig(dataset=tmp_path / "longer", out=tmp_path / "out", drop=tmp_path / "scores.parquet"))
    assert not set(wanted) & set(documents(Dataset(tmp_path / "out")))
    with pytest.raises(PackError, match="is of another corpus"):
        repack(RepackConfig(dataset=tmp_path / "other", out=tmp_path / "out2", drop=tmp_path / "scores.parquet"))
    with pytest.raises(PackError, match="is of another corpus"):
        build(BuildConfig(out=tmp_path / "out3", drop=tmp_path / "scores.parquet", **settings(other, tokenizer_dir)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0:1\n0:100000\n", r"drop, row 2: no record 0:100000 in the corpus \(1 such document\)"),
        ("0:1\n9999:0\n", "row 2: no record 9999:0"),
        ("0:1\nsome\n", "row 2: 'some'; expected a doc_id, or window:record"),
        ('{"doc": 1}\n', "has the columns doc; expected doc_id among them"),
        ('{"doc_id": 1}\n{"doc_id": -4}\n', "row 2: doc_id is -4; expected a whole number"),
        ('{"doc_id": 99999999999999999999999}\n', "row 1: doc_id is 9+; expected a whole number"),
        ('{"doc_id": 1\n', "is not JSONL"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_by_file_and_row(whole, tmp_path, content, message):
    (tmp_path / "drop").write_text(content)
    with pytest.raises(PackError, match=message):
        repack(RepackConfig(dataset=whole.path, out=tmp_path / "out", drop=tmp_path / "drop"))
    assert not (tmp_path / "out").exists()


def test_documents_of_one_record_stay_together(words_dir, tmp_path):
    rows = [{"input_ids": list(range(3 + k, 15 + k)), "seq_lengths": [5, 4, 3]} for k in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = RecordOptions(kind="tokens")
    build(
        BuildConfig(
            sources=tmp_path / "rows.jsonl", out=tmp_path / "all", tokenizer=words_dir, seq_len=8, records=records
        )
    )  # fmt: skip
    every = documents(Dataset(tmp_path / "all"))
    assert {len(ids) for ids in every.values()} == {12}
    repack(RepackConfig(dataset=tmp_path / "all", out=tmp_path / "out", holdout=0.4))
    expected = {number: ids for number, ids in every.items() if is_held_out(ids, 0.4)}
    assert documents(Dataset(tmp_path / "out-holdout")) == expected
    totals = Dataset(tmp_path / "out").manifest["totals"]["documents"]
    assert totals["dropped"] == {"held_out": 3 * len(expected)}


@pytest.mark.parametrize("failing_call", [1, 4, 9])
def test_a_selecting_build_that_was_stopped_continues(corpus, tokenizer_dir, tmp_path, monkeypatch, failing_call):
    chosen = {"holdout": 0.2, "dedup": "exact", **settings(corpus, tokenizer_dir)}
    whole_run = build(BuildConfig(out=tmp_path / "other", **chosen))
    real, calls = repacking.repack_window, []

    def stop(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == failing_call:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(repacking, "repack_window", stop)
    with pytest.raises(KeyboardInterrupt):
        build(BuildConfig(out=tmp_path / "out", **chosen))
    monkeypatch.setattr(repacking, "repack_window", real)
    resumed: BuildResult = build(BuildConfig(out=tmp_path / "out", resume=True, **chosen))
    assert resumed.manifest["dataset_id"] == whole_run.manifest["dataset_id"]
    assert resumed.holdout.manifest["dataset_id"] == whole_run.holdout.manifest["dataset_id"]
    assert not (tmp_path / "out" / "_tmp").exists()
    said: list[str] = []
    monkeypatch.setattr("pipeline.building.progress.Progress.on_message", lambda _, text: said.append(text))
    again = build(BuildConfig(out=tmp_path / "out", **chosen))
    assert (again.manifest["dataset_id"], said[-1]) == (
        whole_run.manifest["dataset_id"],
        f"{tmp_path / 'out'}: is already built; nothing to do",
    )


def test_what_stands_in_the_way_is_refused_before_anything_is_tokenized(corpus, tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.building.selected.build", None)
    (tmp_path / "out-holdout").mkdir()
    (tmp_path / "out-holdout" / "notes.txt").write_text("mine")
    with pytest.raises(PackError, match=r"out-holdout: holds something else \(notes.txt\)"):
        build(BuildConfig(out=tmp_path / "out", holdout=0.2, **settings(corpus, tokenizer_dir)))
    for options, message in (
        ({"holdout": 1.0}, "`holdout`: 1; expected a share between 0 and 1"),
        ({"holdout_out": "x"}, "there is no hold-out"),
        ({"drop_where": "loss > 1"}, "there is no list"),
        ({"holdout": 0.1, "holdout_out": tmp_path / "out"}, "is `out` too"),
        ({"dedup": "exact", "windows": "0::2"}, "need all windows at once"),
        ({"dedup": "fuzzy"}, "expected one of exact"),
    ):
        with pytest.raises(PackError, match=message):
            BuildConfig(out=tmp_path / "out", **settings(corpus, tokenizer_dir, **options))
    with pytest.raises(PackError, match="expected a local directory"):
        build(BuildConfig(out="memory://x/y", dedup="exact", **settings(corpus, tokenizer_dir)))


def test_a_share_without_documents_is_refused_and_leaves_nothing(whole, tmp_path):
    with pytest.raises(PackError, match=r"out-holdout: no document is left for it.*Choose a larger `holdout`"):
        repack(RepackConfig(dataset=whole.path, out=tmp_path / "out", holdout=1e-9))
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_percent_and_says_what_was_set_aside(whole, tmp_path):
    out = tmp_path / "out"
    flags = ["--holdout", "20%", "--holdout-out", str(tmp_path / "eval"), "--dedup", "exact"]
    done = CliRunner().invoke(main, ["repack", str(whole.path), "--out", str(out), *flags], catch_exceptions=False)
    held_out = Dataset(tmp_path / "eval").manifest["totals"]["documents"]
    repeated = held_out["dropped"]["duplicate"]
    assert f"documents set aside: duplicate {repeated}, held_out {held_out['packed']}" in done.stdout
    assert "documents lost: " not in done.stdout
    shown = CliRunner().invoke(main, ["inspect", str(out), "--json"], catch_exceptions=False)
    assert not [warning for warning in json.loads(shown.stdout)["warnings"] if "lost" in warning]
    bad = CliRunner().invoke(main, ["repack", str(whole.path), "--out", str(out), "--holdout", "some"])
    assert (bad.exit_code, "write for example 1% or 0.01" in bad.stderr) == (2, True)
