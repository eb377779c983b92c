"""Batches of documents joined: what one lacks is filled in with its plain case."""

import numpy as np

from pipeline.tokens import Documents, concatenate

PLAIN = Documents(np.array([5, 6, 7, 8, 9], np.int32), np.array([0, 3, 5]), np.array([0, 2]))
MASKED = Documents(
    np.array([1, 2, 3, 4], np.int32),
    np.array([0, 4]),
    np.array([3]),
    loss_mask=np.array([0, 1, 1, 0], np.uint8),
    loss_weights=np.array([0, 0.5, 1, 0], np.float16),
    doc_parts=np.array([1], np.int32),
    turn_ends=np.array([2, 4], np.int32),
    turn_offsets=np.array([0, 2]),
)


def test_documents_lie_end_to_end_and_carry_the_number_of_their_window():
    joined = concatenate([PLAIN, MASKED], window=3)
    assert joined.input_ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert joined.offsets.tolist() == [0, 3, 5, 9]
    assert joined.doc_ids.tolist() == [3 << 32, (3 << 32) + 2, (3 << 32) + 3]
    assert joined.lengths.tolist() == [3, 2, 4]


def test_a_batch_without_mask_weights_or_parts_is_all_targets_of_weight_one_and_first_parts():
    joined = concatenate([PLAIN, MASKED])
    assert joined.loss_mask.tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 0]
    assert joined.loss_weights.tolist() == [1, 1, 1, 1, 1, 0, 0.5, 1, 0]
    assert joined.doc_parts.tolist() == [0, 0, 1]


def test_plain_text_carries_nothing_but_ids_and_offsets():
    joined = concatenate([PLAIN, PLAIN])
    assert all(column is None for column in joined[3:])
    assert joined.mask_of(1, 3).tolist() == [1, 1]


def test_turn_ends_are_kept_where_every_batch_has_them():
    assert concatenate([PLAIN, MASKED]).turn_ends is None
    joined = concatenate([MASKED, MASKED])
    assert joined.turn_ends.tolist() == [2, 4, 2, 4]
    assert joined.turn_offsets.tolist() == [0, 2, 4]


def test_no_batches_are_no_documents():
    empty = concatenate([])
    assert empty.offsets.tolist() == [0]
    assert (len(empty.input_ids), len(empty.doc_ids)) == (0, 0)
