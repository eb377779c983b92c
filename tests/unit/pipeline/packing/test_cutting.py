"""Documents into segments: nothing lost but by policy, cuts where each policy puts them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.packing.cutting import POLICIES, cut
from pipeline.packing.packers import PACKERS
from shards.errors import PackError


def pieces(lengths, seq_len, policy, **options):
    segments = cut(np.array(lengths, np.int64), seq_len, policy, **options)
    assert (segments.document.dtype, segments.start.dtype, segments.length.dtype) == (np.int64, np.int64, np.int32)
    return list(zip(*(column.tolist() for column in segments), strict=True))


def test_the_examples_of_the_docstring_hold():
    found = {policy: pieces([2, 7, 4], 5, policy) for policy in ("split", "truncate", "drop", "wrapped")}
    assert found == {
        "split": [(0, 0, 2), (1, 0, 5), (1, 5, 2), (2, 0, 4)],
        "truncate": [(0, 0, 2), (1, 0, 5), (2, 0, 4)],
        "drop": [(0, 0, 2), (2, 0, 4)],
        "wrapped": [(0, 0, 2), (1, 0, 3), (1, 3, 4), (2, 0, 1), (2, 1, 3)],
    }


def test_split_cuts_into_as_few_parts_as_fit():
    assert pieces([26], 10, "split") == [(0, 0, 10), (0, 10, 10), (0, 20, 6)]
    assert pieces([5, 11], 10, "split") == [(0, 0, 5), (1, 0, 10), (1, 10, 1)]
    assert pieces([20], 10, "split") == [(0, 0, 10), (0, 10, 10)]
    assert sum(length for _, _, length in pieces([7, 2, 4, 1], 5, "split")) == 14


def test_truncate_keeps_one_side():
    assert pieces([7, 2, 4, 1], 5, "truncate") == [(0, 0, 5), (1, 0, 2), (2, 0, 4), (3, 0, 1)]
    assert pieces([7, 2], 5, "truncate", truncate_side="left") == [(0, 2, 5), (1, 0, 2)]


def test_drop_leaves_longer_documents_out():
    assert pieces([7, 2, 5, 6], 5, "drop") == [(1, 0, 2), (2, 0, 5)]


def test_error_names_the_first_longer_document():
    assert pieces([5, 2], 5, "error") == [(0, 0, 5), (1, 0, 2)]
    with pytest.raises(
        PackError, match=r"document 1: 9 tokens; expected at most seq_len, 5 \(2 documents are longer\)"
    ):
        cut(np.array([5, 9, 1, 6]), 5, "error")


def test_wrapped_cuts_where_the_running_row_is_full():
    assert pieces([4, 3, 8], 5, "wrapped") == [(0, 0, 4), (1, 0, 1), (1, 1, 2), (2, 0, 3), (2, 3, 5)]


def test_an_empty_document_gives_no_segment():
    for policy in POLICIES:
        assert pieces([0, 3, 0], 5, policy) == [(1, 0, 3)]
        assert pieces([], 5, policy) == []


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=30), seq_len=st.integers(1, 15))
def test_split_and_wrapped_keep_every_token_once_and_in_order(lengths, seq_len):
    for policy in ("split", "wrapped"):
        tokens = [
            (document, start + k) for document, start, length in pieces(lengths, seq_len, policy) for k in range(length)
        ]
        assert tokens == [(document, k) for document, length in enumerate(lengths) for k in range(length)]


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=30), seq_len=st.integers(1, 15))
def test_next_fit_after_wrapped_fills_every_row_but_the_last(lengths, seq_len):
    segments = cut(np.array(lengths, np.int64), seq_len, "wrapped")
    bins = PACKERS["next-fit"](segments.length, seq_len)
    rows = [segments.length[bins.order[a:b]].sum() for a, b in pairwise(bins.offsets)]
    assert bins.num_bins == -(-sum(lengths) // seq_len)
    assert rows[:-1] == [seq_len] * (bins.num_bins - 1) if rows else not sum(lengths)


def turns(*ends):
    return {
        "turn_ends": np.array([end for document in ends for end in document], np.int64),
        "turn_offsets": np.cumsum([0, *(len(document) for document in ends)]),
    }


def test_truncate_turns_keeps_as_many_whole_turns_as_fit():
    options = turns([3, 9, 26], [7], [], [11, 14], [10, 20])
    # the fourth document's first turn is too long already: no segment; the third has no tokens at all
    assert pieces([26, 7, 0, 14, 20], 10, "truncate-turns", **options) == [(0, 0, 9), (1, 0, 7), (4, 0, 10)]


def test_truncate_turns_from_the_left_keeps_the_last_whole_turns():
    options = turns([3, 17, 26], [7], [20, 32], [3, 21])
    # 26 tokens: from the end of the second turn; 33: one tail token after the last turn is no turn; 21: 18 do not fit
    lengths = [26, 7, 33, 21]
    assert pieces(lengths, 10, "truncate-turns", truncate_side="left", **options) == [(0, 17, 9), (1, 0, 7)]


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=12),
    seq_len=st.integers(1, 20),
    left=st.booleans(),
)
def test_truncate_turns_agrees_with_its_definition(documents, seq_len, left):
    expected = []
    for number, document in enumerate(documents):
        kept = document
        while sum(kept) > seq_len:
            kept = kept[1:] if left else kept[:-1]
        if kept:
            expected.append((number, sum(document) - sum(kept) if left else 0, sum(kept)))
    lengths = [sum(document) for document in documents]
    options = turns(*(np.cumsum(document).tolist() for document in documents))
    side = "left" if left else "right"
    assert pieces(lengths, seq_len, "truncate-turns", truncate_side=side, **options) == expected


def test_unknown_choices_and_missing_turns_are_named():
    with pytest.raises(PackError, match="overlong policy: 'wrap'; expected split, truncate, drop, error, wrapped or"):
        cut(np.array([3]), 5, "wrap")
    with pytest.raises(PackError, match="truncate side: 'up'; expected right or left"):
        cut(np.array([3]), 5, "truncate", truncate_side="up")
    with pytest.raises(PackError, match="documents without turns"):
        cut(np.array([3]), 5, "truncate-turns")
