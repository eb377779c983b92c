"""Fields beside a text: weights are stored, and what changes meaning and is not read is named."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, build
from pipeline.building.audit import audit_sources
from pipeline.cli import main
from pipeline.config import RecordOptions
from shards import Dataset, verify
from shards.errors import PackError

RECORDS = [{"text": f"document {n} of three", "w": weight} for n, weight in enumerate((0.5, 2.0, 0.25))]
BESIDE = [{"text": "one two", "loss_mask": [1, 1], "id": 7}, {"text": "three", "loss_mask": [], "id": 8}]


def written(folder: Path, records: list[dict[str, Any]], suffix: str) -> str:
    path = folder / f"corpus.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    return str(path)


def made(path: str, tokenizer: str, out: Path, **records: Any) -> dict[str, Any]:
    options = RecordOptions(**records)
    return build(BuildConfig(sources=path, out=out, tokenizer=tokenizer, seq_len=64, records=options)).manifest


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_weights_of_texts_lie_in_the_shards(tokenizer_dir, tmp_path, suffix):
    path = written(tmp_path, RECORDS, suffix)
    made(path, tokenizer_dir, tmp_path / "out", weights_field="w")
    plain = made(path, tokenizer_dir, tmp_path / "plain")
    report = verify(tmp_path / "out", level="full")
    audit_sources(str(tmp_path / "out"), (path,), report)
    assert report.ok, report.problems
    found = {}
    for pack in Dataset(tmp_path / "out"):
        for number, record in enumerate(pack["doc_ids"].tolist()):
            start, stop = pack["cu_seqlens"][number : number + 2]
            found[record] = set(pack["loss_weights"][start + 1 : stop].tolist())
    assert found == {number: {record["w"]} for number, record in enumerate(RECORDS)}
    assert plain["facts"]["unread_fields"] == {}, "w is no word for a weight"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_weights_that_nobody_reads_are_named(tokenizer_dir, tmp_path, suffix):
    path = written(tmp_path, BESIDE, suffix)
    manifest = made(path, tokenizer_dir, tmp_path / "out")
    # an empty list is no field; of a column that is not read nobody knows
    count = 1 if suffix == "jsonl" else 2
    assert list(manifest["facts"]["unread_fields"].values()) == [{"loss_mask": count}]
    with pytest.raises(PackError, match="holds 'loss_mask', which no option reads"):
        made(path, tokenizer_dir, tmp_path / "strict", strict_fields=True)


def test_a_record_with_bad_weights_is_named_by_its_line(tokenizer_dir, tmp_path):
    path = written(tmp_path, [*RECORDS, {"text": "four", "w": "high"}], "jsonl")
    command = ["build", path, "--tokenizer", tokenizer_dir, "--seq-len", "64", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, [*command, "--weights-field", "w"])
    assert result.exit_code == 1
    assert "corpus.jsonl, line 4: field 'w' is 'high'; expected 0, or a number from 2^-14" in result.output
