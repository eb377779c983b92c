"""Records are the same from every format: what Arrow's one type for all adds or changes is undone."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import RecordOptions
from pipeline.sources.discovery import resolve_sources

CHAT = RecordOptions(kind="chat")
RECORDS = [
    {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
        ],
        "tools": [{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}],
    },
    {
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "so", "tool_calls": [{"name": "add", "arguments": {"x": 1, "y": [2, 3]}}]},
        ],
        "tools": [{"name": "add", "parameters": {"properties": {"x": {"type": "number", "enum": [1, 2]}}}}],
    },
]


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".gz":
        pq.write_table(table, path)
        path.write_bytes(gzip.compress(path.read_bytes()))
    else:
        pq.write_table(table, path)


def saved(path: Path, records: list[dict], how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write records as `how` says, and return the SOURCE argument."""
    if how in ("jsonl", "json"):
        lines = map(json.dumps, records)
        (path / f"a.{how}").write_text("\n".join(lines) if how == "jsonl" else f"[{','.join(lines)}]")
        return str(path / f"a.{how}")
    if how in ("save_to_disk", "hub"):
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(path / "cache"))
        (path / "repo").mkdir()
        (path / "repo" / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
        if how == "hub":
            return f"hf:{path / 'repo'}"
        datasets.load_dataset("json", data_files=str(path / "repo" / "train.jsonl"), split="train").save_to_disk(
            path / "saved"
        )
        return str(path / "saved")
    write(path / f"a.{how}", pa.Table.from_pylist(records))
    return str(path / f"a.{how}")


@pytest.mark.parametrize("how", ["jsonl", "json", "parquet", "arrow", "parquet.gz", "save_to_disk", "hub"])
def test_a_conversation_is_the_same_from_every_format(tmp_path, how, read_all, monkeypatch):
    """huggingface/trl#5118, huggingface/trl#5376: nulls of struct alignment were trained, Json values stayed text"""
    found = read_all(resolve_sources([saved(tmp_path, RECORDS, how, monkeypatch)], CHAT))
    expected = json.loads(json.dumps(RECORDS))
    if how in ("parquet", "arrow", "parquet.gz"):  # where the second message had no content key at all, no one can tell
        assert all("content" in message for record in found for message in record["messages"])
    assert found == expected


def test_a_null_that_json_spells_stays(tmp_path, read_all):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a", "default": null}]}\n')
    (record,) = read_all(resolve_sources([str(tmp_path / "a.jsonl")], CHAT))
    assert record == {"messages": [{"role": "user", "content": "a", "default": None}]}


@pytest.mark.parametrize("suffix", ["arrow", "parquet", "parquet.gz"])
def test_json_values_are_parsed_at_any_depth(tmp_path, suffix, read_all):
    text = '{"b": [1, null, {"c": "d"}]}'
    json_column = pa.array([text, None], pa.json_())
    nested = pa.StructArray.from_arrays([pa.array([text, '"x"'], pa.json_())], names=["inner"])
    broken = pa.array(["{not json", "1"], pa.json_())
    write(tmp_path / f"a.{suffix}", pa.table({"top": json_column, "nested": nested, "broken": broken}))
    value = {"b": [1, None, {"c": "d"}]}
    assert read_all(resolve_sources([str(tmp_path / f"a.{suffix}")], CHAT)) == [
        {"top": value, "nested": {"inner": value}, "broken": "{not json"},
        {"top": None, "nested": {"inner": "x"}, "broken": 1},
    ]


def test_maps_are_objects_and_times_are_text(tmp_path, read_all):
    from datetime import datetime

    kind = pa.map_(pa.string(), pa.list_(pa.struct({"a": pa.int64(), "b": pa.int64()})))
    table = pa.table(
        {
            "map": pa.array([[("k", [{"a": 1}, {"b": 2}]), ("n", None)], []], kind),
            "when": pa.array([datetime(2024, 5, 6, 7, 8), None]),
        }
    )
    write(tmp_path / "a.parquet", table)
    assert read_all(resolve_sources([str(tmp_path / "a.parquet")], CHAT)) == [
        {"map": {"k": [{"a": 1}, {"b": 2}], "n": None}, "when": "2024-05-06T07:08:00"},
        {"map": {}, "when": None},
    ]


def test_two_columns_of_one_name_are_refused_in_tables_too(tmp_path):
    from shards.errors import SourceError

    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    for suffix in ("parquet", "arrow"):
        write(tmp_path / f"a.{suffix}", twice)
        with pytest.raises(SourceError, match=rf"a\.{suffix}: has two columns 'text'; expected one of a name"):
            resolve_sources([str(tmp_path / f"a.{suffix}")], RecordOptions())
