"""Writing, reading and publishing shards of synthetic rows."""

import json
import pickle
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shards.counts import LENGTH_EDGES, add_counts, imbalance, length_histogram
from shards.errors import FormatError, PackError, counted
from shards.plan import differences, plan_id
from shards.publish import LocalStore, seal, unseal
from shards.reader import Shard
from shards.schema import Layout, position_ids_of
from shards.writer import PackedRows, write_shard


def make_rows(lengths_by_row: list[list[int]], layout: Layout, seed: int = 0) -> PackedRows:
    rng = np.random.default_rng(seed)
    tokens = sum(map(sum, lengths_by_row))
    ids = rng.integers(0, layout.max_token_id + 1, tokens)
    cu = [np.concatenate([[0], np.cumsum(row)]) for row in lengths_by_row]
    mask = rng.integers(0, 2, tokens).astype(np.uint8)
    starts = np.concatenate([[0], np.cumsum([sum(row) for row in lengths_by_row])])
    for row, start in zip(cu, starts, strict=False):
        mask[start + row[:-1]] = 0
    segments = [len(row) for row in lengths_by_row]
    return PackedRows(
        token_offsets=starts.astype(np.int64),
        segment_offsets=np.concatenate([[0], np.cumsum(segments)]).astype(np.int64),
        input_ids=ids.astype(layout.token_type.to_pandas_dtype()),
        position_ids=np.concatenate([np.arange(n) for row in lengths_by_row for n in row] or [[]]).astype(
            layout.position_type.to_pandas_dtype()
        ),
        loss_mask=mask,
        num_tokens=np.diff(starts).astype(np.int32),
        doc_parts=np.zeros(sum(segments), np.int32),
        start_targets=np.zeros(sum(segments), np.uint8),
        cu_seqlens=np.concatenate(cu or [[]]).astype(np.int32),
        doc_ids=np.arange(sum(segments), dtype=np.int64),
        doc_offsets=np.zeros(sum(segments), np.int32),
        max_seqlen=np.array([max(row) for row in lengths_by_row], np.int32),
        num_targets=np.array([mask[a:b].sum() for a, b in pairwise(starts)], np.int32),
        num_target_segments=np.ones(len(lengths_by_row), np.int32),
        attention_pairs=np.array([sum(n * (n + 1) // 2 for n in row) for row in lengths_by_row], np.int64),
    )


ROWS = [[3, 2, 4], [9], [1, 1], [5, 4]]


@pytest.mark.parametrize(("max_id", "expected"), [(65_535, "uint16"), (65_536, "int32"), (131_071, "int32")])
def test_ids_at_the_edge_of_16_bits_read_back_equal(tmp_path, max_id, expected):
    layout = Layout(seq_len=9, max_token_id=max_id)
    rows = make_rows(ROWS, layout)
    rows.input_ids[0] = max_id
    store = LocalStore(tmp_path)
    store.create()
    record = write_shard(store, layout, "plan", 0, rows)
    shard = Shard(tmp_path / record["file"], record["bytes"])
    values, _ = shard.batch(0).lists["input_ids"]
    assert values.dtype == expected
    assert values[0] == max_id
    assert np.array_equal(values, rows.input_ids)


def test_rows_in_many_small_batches_read_back_equal(tmp_path):
    layout = Layout(seq_len=9, max_token_id=99)
    rows = make_rows(ROWS, layout)
    store = LocalStore(tmp_path)
    store.create()
    record = write_shard(store, layout, "plan", 7, rows, batch_tokens=10)
    table = pa.ipc.open_stream(tmp_path / record["file"]).read_all()
    assert [batch.num_rows for batch in table.to_batches()] == [1, 1, 1, 1]
    assert table["cu_seqlens"].to_pylist() == [[0, 3, 5, 9], [0, 9], [0, 1, 2], [0, 5, 9]]
    assert table["position_ids"].to_pylist()[0] == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert table["attention_pairs"].to_pylist() == [19, 45, 2, 25]
    assert list(chain(*table["input_ids"].to_pylist())) == rows.input_ids.tolist()
    assert record["file"].startswith("shards/00000007-")


def test_a_batch_is_never_larger_than_asked_unless_one_row_is(tmp_path):
    layout = Layout(seq_len=100, max_token_id=99)
    rows = make_rows([[10]] * 1000, layout)
    sizes = [batch.num_rows * 10 for batch in rows.batches(layout, layout.schema(), 1000)]
    assert max(sizes) <= 1000
    assert sum(sizes) == 10_000


def test_a_row_is_a_view_on_the_map(tmp_path):
    layout = Layout(seq_len=9, max_token_id=99)
    store = LocalStore(tmp_path)
    store.create()
    record = write_shard(store, layout, "plan", 0, make_rows(ROWS, layout))
    before = pa.total_allocated_bytes()
    shard = Shard(tmp_path / record["file"], record["bytes"])
    batch, local = shard.batch(0), 2
    values, offsets = batch.lists["input_ids"]
    assert not values.flags.owndata
    assert not values.flags.writeable
    assert offsets[local + 1] - offsets[local] == 2
    assert pa.total_allocated_bytes() == before
    shard.advise([2])


def test_a_truncated_shard_is_refused_before_it_is_mapped(tmp_path):
    layout = Layout(seq_len=9, max_token_id=99)
    store = LocalStore(tmp_path)
    store.create()
    record = write_shard(store, layout, "plan", 0, make_rows(ROWS, layout))
    path = tmp_path / record["file"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"has [\d,]+ bytes, the manifest says .* \(rule F3\)"):
        Shard(path, record["bytes"])


def test_positions_follow_from_boundaries():
    assert position_ids_of(np.array([0, 3, 5, 9], np.int32)).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


def test_length_classes_are_exact_when_short_and_narrow_when_long():
    lengths = np.array([1, 2, 2, 255, 256, 300, 5000, 5001])
    histogram = length_histogram(lengths)
    assert histogram[:3] == [[1, 1, 1], [2, 2, 4], [255, 1, 255]]
    assert sum(count for _, count, _ in histogram) == len(lengths)
    assert sum(tokens for _, _, tokens in histogram) == lengths.sum()
    assert (np.diff(LENGTH_EDGES) > 0).all()
    assert (np.diff(LENGTH_EDGES)[255:] / LENGTH_EDGES[255:-1]).max() <= 1 / 64


def test_counts_add_reason_by_reason_and_imbalance_is_named():
    left = {"documents": {"read": 3, "packed": 2, "dropped": {"empty": 1}}, "packs": 1}
    right = {"documents": {"read": 2, "packed": 1, "dropped": {"overlong": 1}}, "packs": 2}
    assert add_counts(left, right) == {
        "documents": {"read": 5, "packed": 3, "dropped": {"empty": 1, "overlong": 1}},
        "packs": 3,
    }
    sheet = {
        "documents": {"read": 3, "packed": 2, "dropped": {}},
        "tokens": {"read": 0, "packed": 0, "lost": {}},
        "targets": {"read": 0, "packed": 0, "lost": {}},
    }
    assert imbalance(sheet) == "documents read 3 is not packed 2 + dropped 0"


def test_sealed_json_notices_any_changed_character():
    sealed = seal({"a": 1, "b": [2, "x"]})
    assert unseal(sealed, "here", "F1") == {"a": 1, "b": [2, "x"]}
    for place, byte in enumerate(sealed):
        if chr(byte).isspace():
            continue
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(FormatError, match="here"):
            unseal(bytes(changed), "here", "F1")


def test_plan_identity_ignores_key_order():
    assert plan_id({"a": 1, "b": 2}) == plan_id({"b": 2, "a": 1})
    assert plan_id({"a": 1}) != plan_id({"a": 2})


def plan_of(*files: tuple[str, int, str], name: str = "web", **changes: Any) -> dict[str, Any]:
    """A plan with one source, as far as differences look at it."""
    entries = [{"name": file, "bytes": size, "fingerprint": mark} for file, size, mark in files]
    plan = {
        "seq_len": 2048, "seed": 0, "position_ids": True, "loss_weights": False, "align": 1, "recipe": 1,
        "part_bytes": 1000,
        "packer": {"name": "auto", "max_segments": None}, "tokenizer": {"digest": "x", "vocab_size": 1000},
        "sources": [{"name": name, "records": {"text_field": "text"}, "files": entries}],
    }  # fmt: skip
    return plan | changes


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (plan_of(seq_len=4096, seed=3), ["seq_len 2048 there, 4096 here", "seed 0 there, 3 here"]),
        (plan_of(packer={"name": "ffd", "max_segments": 4}),
         ["packer auto there, ffd here", "max_segments none there, 4 here"]),
        (plan_of(tokenizer={"digest": "y", "vocab_size": 2000}),
         ["another tokenizer or chat template (vocabulary of 1,000 there, 2,000 here)"]),
        (plan_of(name="code"), ["source web only there", "source code only here"]),
        (plan_of(("b", 1, ""), ("c", 2, ""), ("d", 3, "")), ["source web: file b and 2 other files only here"]),
        (plan_of(sources=[{"name": "web", "records": {"kind": "chat", "text_field": "body"}, "files": []}]),
         ["source web: kind none there, chat here", "source web: text_field text there, body here"]),
        (plan_of(part_bytes=2000), ["windows of 1,000 bytes there, 2,000 here (--window-bytes)"]),
    ],
)  # fmt: skip
def test_differences_of_plans_are_said_in_the_words_of_a_user(new, expected):
    assert differences(plan_of(), new) == expected


def test_a_file_that_changed_is_named_with_its_sizes_and_an_order_with_its_sources():
    assert differences(plan_of(("a.jsonl", 1000, "x")), plan_of(("a.jsonl", 2000, "y"))) == [
        "source web: a.jsonl has changed (1,000 bytes there, 2,000 here)"
    ]
    sources = [plan_of(name=name)["sources"][0] for name in ("web", "code")]
    assert differences(plan_of(sources=sources), plan_of(sources=sources[::-1])) == [
        "sources in the order web, code there, code, web here"
    ]


def test_a_number_and_its_noun_agree():
    said = [counted(number, "pack") for number in (0, 1, 2, 2000)]
    assert said == ["0 packs", "1 pack", "2 packs", "2,000 packs"]
    assert counted(2, "micro-batch") == "2 micro-batches"


def test_put_if_absent_never_replaces(tmp_path):
    store = LocalStore(tmp_path)
    store.create()
    store.put("manifest.json", b"1", if_absent=True)
    with pytest.raises(PackError, match="another build finished first"):
        store.put("manifest.json", b"2", if_absent=True)
    assert (tmp_path / "manifest.json").read_bytes() == b"1"
    assert not list((tmp_path / "_tmp").iterdir())


@pytest.mark.parametrize("system_call", ["write", "fsync", "rename"])
def test_a_failing_system_call_leaves_nothing_under_a_final_name(tmp_path, monkeypatch, system_call):
    def fail(*_):
        raise OSError(28, "No space left on device")

    layout = Layout(seq_len=9, max_token_id=99)
    store = LocalStore(tmp_path)
    store.create()
    monkeypatch.setattr(f"shards.publish.{system_call}", fail)
    if system_call != "rename":
        monkeypatch.setattr(f"shards.writer.{system_call}", fail)
    with pytest.raises(OSError, match="No space left"):
        write_shard(store, layout, "plan", 0, make_rows(ROWS, layout))
    with pytest.raises(OSError, match="No space left"):
        store.put("manifest.json", b"{}")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_unpicklable_map_travels_as_its_path(tmp_path):
    with pytest.raises(FormatError, match="is not a shardpack dataset"):
        pickle.loads(pickle.dumps(__import__("shards.reader", fromlist=["x"]).Dataset(tmp_path)))


def test_json_text_is_ascii_and_readable():
    text = seal({"name": "é<script>"}).decode("ascii")
    assert json.loads(text)["name"] == "é<script>"
