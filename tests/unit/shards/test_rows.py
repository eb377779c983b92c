"""Crafted shards: wrong rows under right hashes are refused with their rule, by reader and verify alike."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shards import Dataset, FormatError, verify
from shards.counts import empty_counts, length_histogram
from shards.manifest import commit
from shards.plan import Plan, make_plan, make_source, plan_id
from shards.publish import LocalStore, canonical, seal
from shards.schema import layout_of
from shards.sidecar import make_sidecar, sidecar_name
from shards.writer import PackedRows, write_shard

SEGMENTS = [[3, 2, 4], [8], [1, 1], [5, 4]]
LENGTHS = np.array([n for row in SEGMENTS for n in row])
STARTS = np.cumsum([0, *LENGTHS])
ROW_STARTS = np.cumsum([0, *map(sum, SEGMENTS)])
NUM_SEGMENTS = np.cumsum([0, *map(len, SEGMENTS)])


def plan_with(**columns: object) -> Plan:
    return make_plan(
        seq_len=12,
        tokenizer={"digest": "0" * 64, "vocab_size": 100, "max_id": 99},
        sources=[make_source("main")],
        windows=[[0, []]],
        **columns,
    )


def good_rows() -> PackedRows:
    """Rows that keep every rule, with every optional column."""
    mask = np.ones(STARTS[-1], np.uint8)
    mask[STARTS[:-1]] = 0
    targets = LENGTHS - 1
    per_row = [slice(a, b) for a, b in pairwise(NUM_SEGMENTS)]
    return PackedRows(
        token_offsets=ROW_STARTS,
        segment_offsets=NUM_SEGMENTS,
        input_ids=(np.arange(STARTS[-1]) % 100).astype(np.uint16),
        position_ids=np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.uint16),
        loss_mask=mask,
        loss_weights=(mask * 0.5).astype(np.float16),
        cu_seqlens=np.concatenate([np.cumsum([0, *row]) for row in SEGMENTS]).astype(np.int32),
        doc_ids=np.arange(len(LENGTHS), dtype=np.int64),
        doc_parts=np.zeros(len(LENGTHS), np.int32),
        doc_offsets=np.zeros(len(LENGTHS), np.int32),
        start_targets=np.zeros(len(LENGTHS), np.uint8),
        start_weights=np.zeros(len(LENGTHS), np.float16),
        turn_ends=np.array([3, 9, 2, 9], np.int32),
        turn_offsets=np.array([0, 2, 2, 3, 4]),
        num_tokens=np.diff(ROW_STARTS).astype(np.int32),
        max_seqlen=np.array([max(row) for row in SEGMENTS], np.int32),
        num_targets=np.array([targets[row].sum() for row in per_row], np.int32),
        num_target_segments=np.array([(targets[row] > 0).sum() for row in per_row], np.int32),
        attention_pairs=np.array([sum(n * (n + 1) // 2 for n in row) for row in SEGMENTS], np.int64),
        weight_sum=np.array([targets[row].sum() / 2 for row in per_row]),
    )


def write(root: Path, rows: PackedRows, plan: Plan, batch_tokens: int = 10) -> Path:
    """Write a dataset of one shard whose hashes and seals are all right."""
    store, layout = LocalStore(root), layout_of(plan)
    store.create()
    store.put("plan.json", canonical(plan))
    counts = empty_counts()
    counts["documents"] |= {"read": len(rows.doc_ids), "packed": len(rows.doc_ids)}
    tokens, targets = int(rows.num_tokens.sum()), int(rows.num_targets.sum())
    counts["tokens"] |= {"read": tokens, "packed": tokens}
    counts["targets"] |= {"read": targets, "packed": targets}
    counts["segments"], counts["packs"] = int(rows.segment_offsets[-1]), len(rows)
    sidecar = make_sidecar(
        plan_id=plan_id(plan),
        window=0,
        source="main",
        shard=write_shard(store, layout, plan_id(plan), 0, rows, batch_tokens),
        counts=counts,
        index=rows.index(layout),
        lengths=length_histogram(LENGTHS),
        segment_lengths=length_histogram(LENGTHS),
    )
    store.put(sidecar_name(0), seal(sidecar))
    commit(store, plan, [sidecar], {}, {})
    store.sweep(everything=True)
    return root


EVERYTHING = {"loss_weights": True, "turn_ends": True}


@pytest.mark.parametrize("batch_tokens", [1, 10, 1 << 20])
@pytest.mark.parametrize("columns", [{}, {"loss_mask": False}, {"position_ids": False}, EVERYTHING])
def test_rows_that_keep_every_rule_are_read_and_verified(tmp_path, columns, batch_tokens):
    rows = good_rows()
    path = write(tmp_path / "d", rows, plan_with(**columns), batch_tokens)
    assert verify(path).problems == []
    dataset = Dataset(path)
    assert [np.diff(pack["cu_seqlens"]).tolist() for pack in dataset] == SEGMENTS
    assert np.concatenate([pack["loss_mask"] for pack in dataset]).tolist() == rows.loss_mask.tolist()
    assert np.concatenate([pack["position_ids"] for pack in dataset]).tolist() == rows.position_ids.tolist()
    weights = [dataset.pack(number).loss_weights for number in range(len(dataset))]
    assert (weights[0] is not None) == ("loss_weights" in columns)
    assert dataset[0].get("turn_ends", np.array([])).tolist() == ([3, 9] if "turn_ends" in columns else [])


def changed(values: np.ndarray, place: int, value: object) -> np.ndarray:
    values = values.copy()
    values[place] = value
    return values


CHANGES = {
    "cu_seqlens beyond the row": ("F7", lambda r: {"cu_seqlens": changed(r.cu_seqlens, 3, 1_000_000)}),
    "cu_seqlens below 0": ("F7", lambda r: {"cu_seqlens": changed(r.cu_seqlens, 5, -5)}),
    "cu_seqlens that fall": ("F7", lambda r: {"cu_seqlens": changed(r.cu_seqlens, 2, 1)}),
    "cu_seqlens that do not start at 0": ("F7", lambda r: {"cu_seqlens": changed(r.cu_seqlens, 0, 1)}),
    "positions that go on": ("F8", lambda r: {"position_ids": changed(r.position_ids, 3, 3)}),
    "a mask of 2": ("F9", lambda r: {"loss_mask": changed(r.loss_mask, 1, 2)}),
    "a target at a segment start": ("F9", lambda r: {"loss_mask": changed(r.loss_mask, 3, 1)}),
    "a weight without a target": ("F9", lambda r: {"loss_weights": changed(r.loss_weights, 3, 1)}),
    "a weight too small for its digits": ("F9", lambda r: {"loss_weights": changed(r.loss_weights, 1, 2.0**-15)}),
    "an infinite weight": ("F9", lambda r: {"loss_weights": changed(r.loss_weights, 1, np.inf)}),
    "a wrong longest segment": ("F10", lambda r: {"max_seqlen": changed(r.max_seqlen, 1, 7)}),
    "a wrong number of targets": ("F10", lambda r: {"num_targets": changed(r.num_targets, 2, 1)}),
    "wrong attention pairs": ("F10", lambda r: {"attention_pairs": changed(r.attention_pairs, 0, 1)}),
    "an id beyond the vocabulary": ("F11", lambda r: {"input_ids": changed(r.input_ids, 11, 60_000)}),
    "a document of another window": ("F12", lambda r: {"doc_ids": changed(r.doc_ids, 2, 7 << 32)}),
    "an offset below 0": ("F12", lambda r: {"doc_offsets": changed(r.doc_offsets, 2, -1)}),
    "a part below 0": ("F12", lambda r: {"doc_parts": changed(r.doc_parts, 2, -1)}),
    "a hidden target where a document begins": ("F12", lambda r: {"start_targets": changed(r.start_targets, 0, 1)}),
    "a hidden weight without its target": ("F12", lambda r: {"start_weights": changed(r.start_weights, 1, 0.5)}),
    "turns that end twice": ("F12", lambda r: {"turn_ends": changed(r.turn_ends, 1, 3)}),
    "a turn that ends beyond its row": ("F12", lambda r: {"turn_ends": changed(r.turn_ends, 2, 3)}),
    "an index of other tokens": ("F13", lambda r: {"num_tokens": changed(r.num_tokens, 3, 8)}),
    "an index of other weights": ("F13", lambda r: {"weight_sum": changed(r.weight_sum, 3, 8.0)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_row_is_refused_with_its_rule(tmp_path, name):
    rule, change = CHANGES[name]
    rows = good_rows()
    path = write(tmp_path / "d", replace(rows, **change(rows)), plan_with(**EVERYTHING))
    dataset = Dataset(path)
    with pytest.raises(FormatError, match=rf"row \d.*\(rule {rule}\)") as caught:
        list(dataset)
    assert caught.value.rule == rule
    with pytest.raises(FormatError, match=rule):
        [dataset.pack(number) for number in range(len(dataset))]
    assert rule in {problem.rule for problem in verify(path).problems}


def test_padding_of_aligned_segments_is_checked(tmp_path):
    plan = plan_with(align=4)
    rows = replace(
        good_rows(),
        token_offsets=np.array([0, 8]), segment_offsets=np.array([0, 1]), input_ids=np.arange(8, dtype=np.uint16),
        position_ids=np.arange(8, dtype=np.uint16), loss_mask=np.array([0, 1, 1, 1, 1, 0, 0, 0], np.uint8),
        cu_seqlens=np.array([0, 8], np.int32), doc_ids=np.zeros(1, np.int64), doc_parts=np.zeros(1, np.int32),
        doc_offsets=np.zeros(1, np.int32), start_targets=np.zeros(1, np.uint8), segment_lens=np.array([5], np.int32),
        num_tokens=np.array([5], np.int32), max_seqlen=np.array([8], np.int32), num_targets=np.array([4], np.int32),
        num_target_segments=np.ones(1, np.int32), attention_pairs=np.array([36], np.int64),
    )  # fmt: skip
    assert verify(write(tmp_path / "good", rows, plan)).problems == []
    for name, wrong, rule in (
        ("short", {"segment_lens": np.array([4], np.int32), "num_tokens": np.array([4], np.int32)}, "F7"),
        ("long", {"segment_lens": np.array([9], np.int32), "num_tokens": np.array([9], np.int32)}, "F7"),
        ("masked", {"loss_mask": np.array([0, 1, 1, 1, 0, 1, 0, 0], np.uint8)}, "F9"),
    ):
        path = write(tmp_path / name, replace(rows, **wrong), plan)
        assert rule in {problem.rule for problem in verify(path).problems}, name
        with pytest.raises(FormatError):
            list(Dataset(path))


def test_a_flipped_bit_that_keeps_every_rule_is_found_by_the_hash(tmp_path):
    path = write(tmp_path / "d", good_rows(), plan_with())
    (shard,) = path.glob("shards/*.arrow")
    data = bytearray(shard.read_bytes())
    ids = np.arange(9, dtype=np.uint16).tobytes()
    data[data.index(ids) + 2] ^= 1
    shard.write_bytes(data)
    dataset = Dataset(path)
    assert dataset[0]["input_ids"][1] == 0, "another token, and no rule of rows tells"
    with pytest.raises(FormatError, match=r"does not match its checksum in the shard list \(rule F4\)"):
        dataset.check_hashes([0])
