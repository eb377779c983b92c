"""`pack inspect` on the terminal and as JSON."""

import io
import json
import re
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import pipeline
from pipeline.cli import main
from pipeline.formatting import format_bytes, format_duration, format_reasons, format_share
from pipeline.report.inspection import typical_lengths
from pipeline.report.rows import row_statistics
from pipeline.report.terminal import make_table
from shards import Dataset


def run(*arguments, **environment):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)], env=environment, catch_exceptions=False)


@pytest.fixture
def dataset(write_dataset):
    return write_dataset({"web": [[30, 20, 10], [64]], "code": [[40, 24]]}, lost={"web": {"overlong": 100}})


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(dataset, columns):
    lines = run(dataset, COLUMNS=str(columns)).output.splitlines()
    assert len(lines) > 20
    assert max(map(len, lines)) <= columns


def test_a_pipe_gets_plain_text(dataset):
    assert "\x1b" not in run(dataset).output
    assert "\x1b" not in run(dataset, NO_COLOR="1", FORCE_COLOR=None).output


def test_a_pipe_gets_whole_lines_however_long(write_dataset):
    datasets = [write_dataset({"web": [[30, 20]]}, name=f"a-dataset-of-long-name-{n}") for n in range(6)]
    lines = run(*datasets, COLUMNS=None).output.splitlines()
    fill = next(line for line in lines if line.startswith("fill rate"))
    assert fill.count("78.1%; 0.0% above the fewest possible, 1 pack") == 6
    for dataset, warning in zip(datasets, lines[-6:], strict=True):
        assert warning.startswith(f"! {dataset}: Packs are only 78.1% full")
        assert warning.endswith("See pack plan.")


def test_one_of_each_is_no_plural(write_dataset):
    said = run(write_dataset({"web": [[64]]}), "--packs-per-step", 1).output
    for text in ("1 of 1 pack, 0 left over", "in 1 shard\n", "above the fewest possible, 1 pack\n"):
        assert text in re.sub(" +\n", "\n", said)


@pytest.mark.parametrize("packer", ["bucketed", "unpacked"])
def test_a_dataset_that_does_not_pack_is_not_called_packed(packer, tokenizer_dir, tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 200)))
    flags = ["--tokenizer", tokenizer_dir, "--seq-len", "256", "--packer", packer, "--workers", "1"]
    build = ["build", str(tmp_path / "corpus.jsonl"), *flags, "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(main, build, catch_exceptions=False).exit_code == 0
    table = run(tmp_path / "out").output.partition("Padding avoided")[2].splitlines()
    assert re.fullmatch(rf"{packer} .* 1.00 x", table[2])
    padded = np.ceil(Dataset(tmp_path / "out").index.num_tokens / 64).clip(max=4) * 64
    for flag in ((), ("--rows",)):
        report = json.loads(run(tmp_path / "out", "--json", *flag).output)
        ways = (report["row_statistics"] if flag else report)["feedings"]
        assert ways[0]["name"] == packer
        assert report["warnings"][0].startswith(f"Packer {packer} puts one segment in a row, which ")
        slots = padded.sum() if packer == "bucketed" else report["tokens"]["packed"]
        assert ways[0]["slots"] == slots


def test_several_datasets_stand_side_by_side_and_differences_are_marked(write_dataset):
    one = write_dataset({"web": [[30, 20]]}, name="one")
    two = write_dataset({"web": [[30, 20]]}, name="two", seq_len=128)
    lines = run(one, two, COLUMNS="160").output.splitlines()
    line = {text.split("  ")[0].strip(): text for text in lines}
    assert re.search(r"seq_len +≠ +64 +128", line["seq_len"])
    assert "≠" not in line["packer"]
    found = json.loads(run(one, two, "--json").output)
    assert [report["plan"]["seq_len"] for report in found] == [64, 128]


def test_the_json_is_one_object_with_the_documented_fields(dataset):
    report = json.loads(run(dataset, "--json").output)
    assert set(report) == {
        *("report", "path", "dataset_id", "plan_id", "plan", "documents", "tokens", "targets", "segments", "packs"),
        *("fill", "lengths", "segments_per_pack", "cost", "feedings", "model", "steps", "sources", "mix", "disk"),
        *("build", "warnings", "block_shuffle"),
    }


def test_datasets_and_runs_do_not_mix(dataset, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    done = run(dataset, tmp_path)
    assert (done.exit_code, done.output.count("\n")) == (1, 1)


def test_a_bad_mix_is_one_line(dataset):
    result = run(dataset, "--mix", "web")
    assert result.exit_code == 1
    assert result.stderr == "Error: --mix: 'web'; expected NAME=WEIGHT, such as web=0.7,code=0.3.\n"
    assert run(dataset, "--mix", "other=1").exit_code == 1


def test_a_deep_look_counts_what_the_rows_hold(write_dataset):
    dataset = Dataset(write_dataset({"web": [[30, 20, 10], [1], [64]]}))
    seen, figures = set(), {"duplicate_segments": 0, "segments_without_target": 0, "tokens_without_target": 0}
    for row in dataset:
        bounds = row["cu_seqlens"]
        for start, stop in pairwise(bounds):
            ids = tuple(row["input_ids"][start:stop].tolist())
            figures["duplicate_segments"] += ids in seen
            seen.add(ids)
            if not row["loss_mask"][start:stop].any():
                figures["segments_without_target"] += 1
                figures["tokens_without_target"] += stop - start
    found = row_statistics(dataset)
    assert {name: found[name] for name in figures} == figures
    assert figures["segments_without_target"] > 0
    assert found["lengths"] == [[1, 1], [10, 1], [20, 1], [30, 1], [64, 1]]
    assert found["distinct_tokens"] == len({int(token) for row in dataset for token in row["input_ids"]})
    assert found["feedings"][0]["slots"] == 125


def test_a_deep_look_finds_documents_that_are_there_twice(write_dataset):
    # the same seed, so the two sources begin with the same ids only by chance; one token each makes it certain
    found = row_statistics(Dataset(write_dataset({"web": [[1] * 60] * 20}, vocab_size=300)))
    assert found["duplicate_segments"] == 1200 - found["distinct_tokens"]
    assert found["duplicate_tokens"] == found["duplicate_segments"]


def test_typical_lengths_stand_for_the_histogram():
    report = {"lengths": {"documents": {"histogram": [[10, 4, 40], [300, 2, 604]]}}}
    assert typical_lengths(report).tolist() == [10] * 4 + [302] * 2
    many = {"lengths": {"documents": {"histogram": [[10, 3_000_000, 30_000_000], [50, 1_000_000, 50_000_000]]}}}
    assert np.unique(typical_lengths(many), return_counts=True)[1].tolist() == [750_000, 250_000]


def test_figures_are_written_as_people_read_them():
    assert [format_share(0.0), format_share(0.5), format_share(0.9999), format_share(0.00012)] == [
        "0.0%",
        "50.0%",
        "99.990%",
        "0.012%",
    ]
    assert [format_bytes(512), format_bytes(2048), format_bytes(3 << 30)] == ["512 B", "2.0 KiB", "3.0 GiB"]
    assert [format_duration(5), format_duration(90), format_duration(600), format_duration(7200 * 3)] == [
        "5.0 s",
        "90 s",
        "10 min",
        "6.0 h",
    ]
    assert format_reasons({"empty": 2, "never": 0, "rejected": 3000}) == "rejected 3,000, empty 2"


def test_a_share_that_is_not_everything_or_nothing_is_not_rounded_to_it():
    shares = [0.99952, 0.9999949, 0.999999, 1 - 1e-12, 1.0, 0.0, 1e-12, 0.000004, 0.000006]
    written = ["99.952%", "99.999%", ">99.999%", ">99.999%", "100.0%", "0.0%", "<0.001%", "<0.001%", "0.001%"]
    assert [format_share(share) for share in shares] == written
    assert format_duration(0.004) == "<0.1 s"


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_a_table_gives_up_space_before_it_breaks_a_number(columns):
    rows = [["documents", "1,234.5", "98", "12,345"], ["segments", "383.3", "1", "1,048,576"]]
    console = Console(width=columns, file=io.StringIO())
    console.print(make_table(["", "mean of all the documents there are", "p1", "max"], rows))
    text = console.file.getvalue()
    assert all(cell in text for row in rows for cell in row)
    assert max(map(len, text.splitlines())) <= columns


def test_a_report_from_python_is_that_of_the_command(dataset):
    expected = json.loads(run(dataset, "--json", "--rows", "--packs-per-step", 4).output)
    assert json.loads(json.dumps(pipeline.inspect(dataset, rows=True, packs_per_step=4))) == expected


def test_how_far_blocks_of_shards_are_from_a_full_shuffle_is_said_where_they_are(write_dataset, dataset):
    assert "block-shuffled" not in run(dataset).output
    many = write_dataset({f"source-{number}": [[64]] for number in range(70)}, name="many")
    figures = json.loads(run(many, "--json").output)["block_shuffle"]
    # 64 of 70 shards of one pack lie in a block: a pack meets 63 of the 69 others, and all of its own source
    assert figures["meeting_share"] == pytest.approx(63 / 69)
    assert set(figures["by_source"].values()) == {1.0}
    line = next(line for line in run(many, COLUMNS="200").output.splitlines() if line.startswith("block-shuffled"))
    assert "91.3% of the pairs of packs can meet in a step of an epoch, in blocks of 64 shards" in line
