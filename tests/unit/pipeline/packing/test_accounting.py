"""What a cut loses is counted: documents, tokens and targets, by reason, on windows small enough to count by hand."""

import numpy as np
import pytest

from pipeline.config import RecordOptions
from pipeline.packing.accounting import cut_documents
from pipeline.tokens import Documents


def window(*masks):
    """Documents given by their masks; empty documents have an empty mask."""
    lengths = [len(mask) for mask in masks]
    return Documents(
        input_ids=np.arange(sum(lengths), dtype=np.int32),
        loss_mask=np.array([bit for mask in masks for bit in mask], np.uint8),
        offsets=np.cumsum([0, *lengths]),
        doc_ids=np.arange(len(masks)),
    )


def listed(segments):
    return list(zip(*(column.tolist() for column in segments), strict=True))


def test_the_example_of_the_docstring_holds():
    documents = window([1] * 6, [0] * 3, [1, 0, 0, 0, 0])
    segments, balance = cut_documents(documents, RecordOptions(), 4)
    assert listed(segments) == [(0, 0, 4), (0, 4, 2)]
    assert balance.documents == {"read": 3, "packed": 1, "split": 1, "truncated": 0, "dropped": {"no_target": 2}}
    assert balance.tokens == {"read": 14, "packed": 6, "lost": {"no_target": 8}}
    assert balance.targets == {"read": 5, "packed": 4, "lost": {"boundary": 1}}


def test_a_truncated_document_loses_its_far_end_and_the_targets_there():
    segments, balance = cut_documents(window([0, 1, 1, 0, 1, 1], [0, 1]), RecordOptions(overlong="truncate"), 4)
    assert listed(segments) == [(0, 0, 4), (1, 0, 2)]
    assert balance.documents == {"read": 2, "packed": 2, "split": 0, "truncated": 1, "dropped": {}}
    assert balance.tokens == {"read": 8, "packed": 6, "lost": {"truncated": 2}}
    assert balance.targets == {"read": 5, "packed": 3, "lost": {"truncated": 2}}


def test_a_document_that_truncation_leaves_without_targets_is_dropped_for_that():
    segments, balance = cut_documents(window([0, 0, 0, 1, 1], [0, 1]), RecordOptions(overlong="truncate"), 3)
    assert listed(segments) == [(1, 0, 2)]
    assert balance.documents["dropped"] == {"no_target": 1}
    assert balance.tokens == {"read": 7, "packed": 2, "lost": {"no_target": 5}}
    assert balance.targets == {"read": 3, "packed": 1, "lost": {"no_target": 2}}


def test_a_document_that_the_policy_drops_counts_as_overlong():
    _, balance = cut_documents(window([0, 1, 1, 1], [0, 1]), RecordOptions(overlong="drop"), 3)
    assert balance.documents["dropped"] == {"overlong": 1}
    assert balance.tokens == {"read": 6, "packed": 2, "lost": {"overlong": 4}}
    assert balance.targets == {"read": 4, "packed": 1, "lost": {"overlong": 3}}


def test_a_packer_with_a_cut_policy_keeps_segments_without_targets():
    documents = window([0, 0, 1], [0, 0, 0, 1])  # cut at 4: document 1 begins with a segment of one token
    segments, balance = cut_documents(documents, RecordOptions(), 4, "wrapped")
    assert listed(segments) == [(0, 0, 3), (1, 0, 1), (1, 1, 3)]
    assert balance.documents["dropped"] == {}
    lone = window([0, 0, 1], [1, 1])  # document 1: its two tokens fall into two rows, each the first of its segment
    for policy, packed in (("wrapped", 2), (None, 2)):
        assert cut_documents(lone, RecordOptions(), 4, policy)[1].documents["packed"] == packed
    assert cut_documents(lone, RecordOptions(), 4, "wrapped")[1].targets["lost"] == {"boundary": 1}


def test_documents_without_targets_stay_where_the_user_wants_them():
    segments, balance = cut_documents(window([0, 0], [0, 1]), RecordOptions(keep_no_target=True), 4)
    assert listed(segments) == [(0, 0, 2), (1, 0, 2)]
    assert balance.documents["dropped"] == {}
    assert balance.tokens["lost"] == {}


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
def test_what_was_read_is_what_is_packed_and_what_is_lost(policy):
    rng = np.random.default_rng(3)
    documents = window(*(rng.integers(0, 2, rng.integers(1, 30)).tolist() for _ in range(200)))
    segments, balance = cut_documents(documents, RecordOptions(overlong=policy), 8)
    lost_tokens, lost_targets = balance.tokens["lost"], balance.targets["lost"]
    assert lost_tokens
    assert lost_targets
    assert balance.tokens["packed"] == segments.length.sum()
    assert balance.tokens["read"] == documents.offsets[-1] == balance.tokens["packed"] + sum(lost_tokens.values())
    firsts = documents.loss_mask[documents.offsets[:-1]].sum()  # the first token of a document is nobody's target
    assert balance.targets["read"] == documents.loss_mask.sum() - firsts
    assert balance.targets["read"] == balance.targets["packed"] + sum(lost_targets.values())
    assert balance.documents["packed"] + sum(balance.documents["dropped"].values()) == 200
