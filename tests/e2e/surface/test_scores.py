"""pack score on the terminal, and the commands that take its file."""

import json

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipeline.cli import main
from shards.tables.scores import SCHEMA


def test_the_command_writes_a_table_that_show_and_trace_take(packed, llama, tmp_path):
    out = tmp_path / "scores.parquet"
    flags = ["--model", llama, "--dtype", "fp32", "--device", "cpu", "--out", str(out), "--json"]
    done = CliRunner().invoke(main, ["score", packed, *flags], catch_exceptions=False)
    summary = json.loads(done.stdout)
    table = pq.read_table(out)
    assert table.schema.remove_metadata().equals(SCHEMA)
    assert summary["documents"] == table.num_rows
    shown = CliRunner().invoke(
        main, ["show", packed, "--scores", str(out), "--worst", "--limit", "1", "--json"],
        catch_exceptions=False,
    )  # fmt: skip
    (pack,) = [json.loads(line) for line in shown.stdout.splitlines()]
    highest = summary["worst"][0]
    losses = {segment["document"]: segment["loss"] for segment in pack["segments"]}
    assert losses[highest["doc_id"]] == pytest.approx(highest["loss"])
    text = CliRunner().invoke(main, ["show", packed, "--scores", str(out)], catch_exceptions=False)
    assert ", loss " in text.stdout
