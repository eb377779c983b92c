"""What a plan promises, against what a build of the same corpus gives."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

import pipeline
from pipeline.cli import main
from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.estimate.advisor import draw_samples, estimate_sources, recommend
from pipeline.estimate.sampling import sample_documents
from pipeline.sources.discovery import resolve_sources
from shards import Dataset, PackError


@pytest.fixture
def corpus(tmp_path):
    """600 documents of 1 to about 900 tokens; the last ones in one JSON array, which is read as a stream."""
    rng = np.random.default_rng(0)
    records = [{"text": "word and " * int(n)} for n in rng.lognormal(3, 1, 600).clip(1, 300)]
    (tmp_path / "corpus").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records[:500])
    (tmp_path / "corpus" / "a.jsonl").write_text(lines)
    (tmp_path / "corpus" / "b.json").write_text(json.dumps(records[500:]))
    return tmp_path / "corpus"


@pytest.fixture(scope="module")
def encoder(tokenizer_dir):
    return Encoder(tokenizer_dir, engine="tokenizers")


def test_a_plan_of_everything_promises_what_a_build_gives(corpus, tokenizer_dir, encoder, tmp_path):
    found = estimate_sources(
        resolve_sources([str(corpus)], RecordOptions()), encoder, seconds=600, seq_lens=(256, 1024)
    )
    assert found["sample"]["whole"]
    assert found["corpus"]["documents"] == 600
    for seq_len in (256, 1024):
        out = tmp_path / str(seq_len)
        flags = ["--tokenizer", tokenizer_dir, "--seq-len", str(seq_len), "--out", str(out), "--workers", "1"]
        done = CliRunner().invoke(main, ["build", str(corpus), *flags], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        dataset = Dataset(out)
        row = next(r for r in found["outcomes"] if (r["seq_len"], r["packer"]) == (seq_len, "auto"))
        assert found["corpus"]["tokens"] == int(dataset.index.num_tokens.sum())
        assert row["documents_cut"] == dataset.manifest["totals"]["documents"]["split"] / 600
        assert 0 <= len(dataset) - row["packs"] <= 1  # the build packs the streamed file in a window of its own


def test_a_part_of_the_corpus_stands_for_the_whole(corpus, encoder, monkeypatch):
    monkeypatch.setattr("pipeline.estimate.advisor.CHUNK_BYTES", 4096)
    sources = resolve_sources([str(corpus / "a.jsonl")], RecordOptions())
    whole = estimate_sources(sources, encoder, seconds=600, seq_lens=(1024,))
    clock = iter(range(10**6))
    monkeypatch.setattr("pipeline.estimate.advisor.time.perf_counter", lambda: float(next(clock)))
    part = estimate_sources(sources, encoder, seconds=50, seq_lens=(1024,))
    assert part["sample"]["documents"] < whole["sample"]["documents"] == 500
    assert not part["sample"]["whole"]
    # 40 chunks of some 120: their mean is off by a tenth at most
    assert part["corpus"]["tokens"] == pytest.approx(whole["corpus"]["tokens"], rel=0.1)


def test_every_source_is_seen_even_when_there_is_no_time(corpus, encoder):
    sources = resolve_sources([f"one={corpus / 'a.jsonl'}", f"two={corpus / 'b.json'}"], RecordOptions())
    samples = draw_samples(sources, encoder, 0.0, 0)
    assert [bool(sample.lengths) for sample in samples] == [True, True]


def row(seq_len, fill, cut, packs=1000, lost=0.0, cost=1.0):
    return {
        "packer": "auto",
        "seq_len": seq_len,
        "fill": fill,
        "documents_cut": cut,
        "packs": packs,
        "tokens_lost": lost,
        "relative_cost": cost,
    }


def test_the_smallest_seq_len_that_cuts_few_documents_is_recommended():
    rows = [row(2048, 0.99, 0.11), row(4096, 0.999, 0.003), row(8192, 0.999, 0.0)]
    advice = recommend(rows, None)
    assert advice["seq_len"] == 4096
    assert advice["reason"] == "99.9% full, 0.3% of documents cut; 2048 would cut 11.0%"


def test_advice_never_calls_nearly_full_packs_full():
    assert recommend([row(2048, 0.99952, 0.00001)], None)["reason"] == "99.952% full, 0.001% of documents cut"


def test_a_model_with_few_positions_limits_the_advice():
    rows = [row(2048, 0.99, 0.11), row(4096, 0.999, 0.003)]
    assert recommend(rows, 2048)["seq_len"] == 2048
    assert "no seq_len cuts few documents" in recommend(rows, 2048)["reason"]
    assert recommend(rows, 512)["seq_len"] is None


def test_a_small_corpus_is_not_blamed_for_its_last_pack():
    reason = "60.0% full, 0.0% of documents cut (empty: 0.8 of 2 packs)"
    assert recommend([row(2048, 0.60, 0.0, packs=2)], None)["reason"] == reason


def test_of_seq_lens_that_do_equally_well_the_smallest_is_recommended():
    # 24 documents of 3,600 tokens: one a pack of 4,096, two a pack of 8,192, and 18 in one of 65,536
    rows = [row(2048, 0.879, 1.0, 48), row(4096, 0.879, 0.0, 24), row(8192, 0.879, 0.0, 12), row(65536, 0.659, 0.0, 2)]
    advice = recommend(rows, None)
    assert advice["seq_len"] == 4096
    reason = "87.9% full, 0.0% of documents cut (empty: 2.9 of 24 packs); 2048 would cut 100.0%"
    assert advice["reason"] == reason


def test_the_reason_names_what_speaks_against_the_next_smaller_seq_len():
    chosen = row(8192, 0.89, 0.0, 6)
    for worse, said in (
        (row(4096, 0.80, 0.0, 14), "4096 would be 80.0% full and cut 0.0%"),
        (row(4096, 0.89, 0.02, 12), "4096 would cut 2.0%"),
        (row(4096, 0.89, 0.0, 12, lost=0.05), "4096 would lose 5.0% of tokens"),
        (row(4096, 0.89, 0.0, 12, cost=1.5), "4096 would cost 1.500 times as much a token"),
    ):
        advice = recommend([worse, chosen], None)
        assert advice["seq_len"] == 8192
        assert advice["reason"].endswith(f"(empty: 0.7 of 6 packs); {said}")


def test_a_corpus_without_documents_is_an_error(tmp_path, encoder):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(PackError, match=r"no document in the sample \(0 bad records, 1 empty\)"):
        estimate_sources(resolve_sources([str(tmp_path / "a.jsonl")], RecordOptions()), encoder)


def test_a_plan_that_sees_no_document_names_the_fields_there_are_and_the_flag(tmp_path, encoder):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "title": "y"}\n' * 3)
    expected = r"3 bad records.*a\.jsonl, line 1: no field 'text', only 'body', 'title'; .*see `text_field`"
    with pytest.raises(PackError, match=expected):
        estimate_sources(resolve_sources([str(tmp_path / "a.jsonl")], RecordOptions()), encoder)


def test_a_sample_for_a_benchmark_that_finds_no_text_says_why_too(tmp_path, encoder):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(PackError, match=r"no text to read.*a\.jsonl, line 1: no field 'text', only 'body'"):
        sample_documents((str(tmp_path / "a.jsonl"),), encoder, RecordOptions(), 64, 0, lambda _, tokens: tokens > 0)


def test_bad_records_count_in_a_chunk_that_the_deadline_ends_too(tmp_path, encoder):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"body": "x"}\n')
    (sample,) = draw_samples(resolve_sources([str(tmp_path / "a.jsonl")], RecordOptions()), encoder, 0.0, 0)
    assert (sum(map(len, sample.lengths)), sample.rejected, sample.whole) == (1, 1, False)


def test_a_plan_says_why_records_are_left_out_and_that_a_build_stops_there(tmp_path, tokenizer_dir, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # a narrow terminal folds the sentence
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 3 + '{"body": "x"}\n')
    flags = [str(tmp_path / "a.jsonl"), "--tokenizer", tokenizer_dir]
    built = CliRunner().invoke(main, ["build", *flags, "--seq-len", "64", "--out", str(tmp_path / "out")])
    shown = CliRunner().invoke(main, ["plan", *flags], catch_exceptions=False).stdout
    found = json.loads(CliRunner().invoke(main, ["plan", *flags, "--json"], catch_exceptions=False).stdout)
    reason = found["sample"]["first_rejected"]
    assert "a.jsonl, line 4: no field 'text'" in reason
    assert built.exit_code == 1
    assert reason.replace("`text_field`", "--text-field") in built.output, "an error names flags"
    assert f"! {reason}. A build stops there unless --on-error skip leaves such records out: 25.0% of those" in shown


def test_a_plan_of_good_records_warns_of_nothing(corpus, tokenizer_dir):
    flags = [str(corpus), "--tokenizer", tokenizer_dir]
    assert "A build stops" not in CliRunner().invoke(main, ["plan", *flags], catch_exceptions=False).stdout
    found = json.loads(CliRunner().invoke(main, ["plan", *flags, "--json"], catch_exceptions=False).stdout)
    assert found["sample"]["first_rejected"] is None


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_no_time_to_sample_is_refused(corpus, tokenizer_dir, seconds):
    done = CliRunner().invoke(main, ["plan", str(corpus), "--tokenizer", tokenizer_dir, "--seconds", seconds])
    assert done.exit_code == 1
    assert f"--seconds: {seconds}; expected more than 0, such as 20.\n" in done.output


def test_the_command_writes_nothing_and_prints_figures(corpus, tokenizer_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(
        main, ["plan", str(corpus), "--tokenizer", tokenizer_dir, "--json"], catch_exceptions=False
    )
    assert json.loads(done.stdout)["recommendation"]["packer"] == "auto"
    shown = CliRunner().invoke(main, ["plan", str(corpus), "--tokenizer", tokenizer_dir], catch_exceptions=False)
    assert "→ --seq-len" in shown.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_an_estimate_from_python_is_that_of_the_command(corpus, tokenizer_dir):
    done = CliRunner().invoke(main, ["plan", str(corpus), "--tokenizer", tokenizer_dir, "--json", "--workers", "1"])
    expected = json.loads(done.stdout)
    found = pipeline.estimate_corpus(corpus, tokenizer_dir)
    for key in ("corpus", "outcomes", "recommendation", "model"):
        assert found[key] == expected[key]


@pytest.mark.parametrize("window_bytes", [2000, 5000])
def test_a_plan_counts_the_packs_that_windows_cost(tmp_path, tokenizer_dir, encoder, monkeypatch, window_bytes):
    words = np.random.default_rng(1).integers(5, 60, 400)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "word " * int(n)}) + "\n" for n in words))
    out = tmp_path / "out"
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "1024", "--workers", "1", "--window-bytes", str(window_bytes)]
    built = CliRunner().invoke(main, ["build", str(tmp_path / "a.jsonl"), *flags, "--out", str(out)])
    assert built.exit_code == 0, built.output
    monkeypatch.setattr("pipeline.sources.windows.default_window_bytes", lambda sources: window_bytes)
    found = estimate_sources(
        resolve_sources([str(tmp_path / "a.jsonl")], RecordOptions()), encoder, seconds=600, seq_lens=(1024,)
    )
    row = next(outcome for outcome in found["outcomes"] if outcome["packer"] == "auto")
    packs, tokens = len(Dataset(out)), int(Dataset(out).index.num_tokens.sum())
    assert packs > 1.02 * tokens / 1024
    assert row["packs"] == pytest.approx(packs, rel=0.05)  # sixteen windows stand for all


def _small_files(folder, kind):
    """Write 300 files of one to three records of some 10 to 200 words; return the folder."""
    rng = np.random.default_rng(7)
    folder.mkdir()
    for number in range(300):
        texts = ["word and " * int(rng.integers(5, 100)) for _ in range(int(rng.integers(1, 4)))]
        records = [{"text": text} for text in texts]
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        content, suffix = {
            "json": (json.dumps(records).encode(), "json"),
            "csv": (("text\n" + "".join(f"{text}\n" for text in texts)).encode(), "csv"),
            "gzip": (gzip.compress(lines), "jsonl.gz"),
            "zstd": (pa.compress(lines, codec="zstd", asbytes=True), "jsonl.zst"),
            "jsonl": (lines, "jsonl"),
        }[kind]
        (folder / f"{number}.{suffix}").write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", ["json", "csv", "gzip", "zstd", "jsonl"])
def test_small_files_are_predicted_within_a_percent(kind, tmp_path, tokenizer_dir, encoder, monkeypatch):
    corpus = _small_files(tmp_path / "corpus", kind)
    sources = resolve_sources([str(corpus)], RecordOptions())
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "256", "--workers", "1", "--out", str(tmp_path / "out")]
    built = CliRunner().invoke(main, ["build", str(corpus), *flags])
    assert built.exit_code == 0, built.output
    stored = sum(file.stat().st_size for file in corpus.iterdir())
    for seconds in (10**6, 200):  # all of it, and about two thirds of the files
        clock = iter(range(10**6))
        monkeypatch.setattr("pipeline.estimate.advisor.time.perf_counter", lambda clock=clock: float(next(clock)))
        found = estimate_sources(sources, encoder, seconds=seconds, seq_lens=(256,))
        row = next(outcome for outcome in found["outcomes"] if outcome["packer"] == "auto")
        dataset = Dataset(tmp_path / "out")
        assert found["sample"]["corpus_bytes"] == stored
        assert found["sample"]["whole"] is (seconds == 10**6 or kind == "jsonl")  # one chunk holds all that is plain
        fill = int(dataset.index.num_tokens.sum()) / (len(dataset) * 256)
        assert row["fill"] == pytest.approx(fill, rel=0.01)
        if found["sample"]["whole"]:
            assert row["packs"] == pytest.approx(len(dataset), rel=0.01)
        else:
            assert row["packs"] == pytest.approx(len(dataset), rel=0.05)  # 200 files say what 300 hold
