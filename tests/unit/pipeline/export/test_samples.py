"""Packs as samples: the examples of the docstrings, computed."""

import numpy as np

from pipeline.export.naming import file_stems
from pipeline.export.samples import sample_of, without_padding
from pipeline.export.tables import bridge_sample, in_groups

ROW = {
    "input_ids": np.array([5, 6, 7, 8, 9], np.uint16),
    "position_ids": np.array([0, 1, 2, 0, 1], np.uint16),
    "loss_mask": np.array([0, 1, 1, 0, 1], np.uint8),
    "cu_seqlens": np.array([0, 3, 5], np.int32),
    "doc_ids": np.array([4, 9]),
    "doc_parts": np.array([0, 1], np.int32),
    "doc_offsets": np.array([0, 7], np.int32),
}


def lists(sample):
    return {name: values.tolist() for name, values in sample.items()}


def test_a_sample_has_labels_in_the_places_of_ids():
    assert lists(sample_of(ROW)) == {
        "input_ids": [5, 6, 7, 8, 9],
        "labels": [-100, 6, 7, -100, 9],
        "position_ids": [0, 1, 2, 0, 1],
        "seq_lengths": [3, 2],
        "doc_ids": [4, 9],
        "doc_parts": [0, 1],
        "doc_offsets": [0, 7],
    }


def test_megatron_bridge_gets_the_mask_of_the_next_token():
    sample = lists(bridge_sample(ROW))
    assert (sample["loss_mask"], sample["seq_start_id"]) == ([1, 1, 0, 1, 0], [0, 3])


def test_padding_is_taken_out():
    padded = ROW | {
        "input_ids": np.array([5, 6, 7, 0, 8, 9, 0, 0], np.uint16),
        "position_ids": np.array([0, 1, 2, 3, 0, 1, 2, 3], np.uint16),
        "loss_mask": np.array([0, 1, 1, 0, 0, 1, 0, 0], np.uint8),
        "cu_seqlens": np.array([0, 4, 8], np.int32),
        "segment_lens": np.array([3, 2], np.int32),
    }
    assert lists(sample_of(without_padding(padded))) == lists(sample_of(ROW))


def test_groups_of_rows_end_at_about_a_million_tokens():
    samples = [{"input_ids": np.zeros(600_000)} for _ in range(5)]
    assert [len(group) for group in in_groups(samples)] == [2, 2, 1]
    assert list(in_groups([])) == []


def test_sources_get_files_of_their_own():
    stems = file_stems(["web", "a/b", "a:b", "..", "ü"])
    assert stems == {"web": "web", "a/b": "a_b", "a:b": "a_b-2", "..": "documents", "ü": "ü"}
