"""Rows of a window: what is stored of each segment beside its tokens, counted by hand."""

import numpy as np
import pytest

from pipeline.packing.cutting import Segments, cut
from pipeline.packing.packers import PACKERS
from pipeline.packing.rows import align_up, assemble_rows, count_targets
from pipeline.tokens import Documents
from shards.schema import Layout

# two documents of 7 and 3 tokens; of the first, tokens 1, 2 and 4 to 6 are trained
IDS = np.arange(10, 20, dtype=np.int32)
MASK = np.array([0, 1, 1, 0, 1, 1, 1, 0, 0, 1], np.uint8)
OFFSETS = np.array([0, 7, 10])


def documents(**columns):
    return Documents(IDS, OFFSETS, np.array([4, 9]), **{"loss_mask": MASK, **columns})


def rows_of(given, seq_len=4, **layout):
    """Cut at `seq_len`, one segment after another in rows of `seq_len`."""
    segments = cut(np.diff(OFFSETS), seq_len, "split")
    shape = Layout(seq_len=seq_len, max_token_id=99, **layout)
    bins = PACKERS["next-fit"](align_up(segments.length, shape.align), seq_len)
    return assemble_rows(given, segments, bins, shape)


def test_a_target_that_a_cut_put_first_is_remembered_though_nothing_predicts_it():
    rows = rows_of(documents())
    assert rows.doc_offsets.tolist() == [0, 4, 0]
    assert rows.start_targets.tolist() == [0, 1, 0]
    assert rows.loss_mask.tolist() == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    text = rows_of(documents(loss_mask=None))
    assert text.start_targets.tolist() == [0, 1, 0], "of a text every token but the first is a target"


def test_joining_segments_again_gives_back_every_target():
    rows = rows_of(documents())
    mask = rows.loss_mask.copy()
    mask[np.cumsum([0, 4, 3])] |= rows.start_targets
    assert mask.tolist() == MASK.tolist()


def test_the_weight_of_a_target_that_a_cut_put_first_is_remembered_too():
    weights = (MASK * np.arange(1, 11)).astype(np.float16)
    rows = rows_of(documents(loss_weights=weights), loss_weights=True)
    assert rows.start_weights.tolist() == [0, 5, 0]
    assert rows.loss_weights.tolist() == [0, 2, 3, 0, 0, 6, 7, 0, 0, 10]
    assert rows.weight_sum.sum() == weights.sum() - 5


def test_segments_name_the_part_of_their_record():
    assert rows_of(documents()).doc_parts.tolist() == [0, 0, 0]
    assert rows_of(documents(doc_parts=np.array([0, 3], np.int32))).doc_parts.tolist() == [0, 0, 3]


def test_turn_ends_are_counted_from_the_beginning_of_the_row():
    turns = {"turn_ends": np.array([2, 5, 7, 3], np.int32), "turn_offsets": np.array([0, 3, 4])}
    rows = rows_of(documents(**turns), seq_len=8)  # 7 tokens, then 3: two rows
    assert rows.turn_ends.tolist() == [2, 5, 7, 3]
    assert rows.turn_offsets.tolist() == [0, 3, 4]
    cut_up = rows_of(documents(**turns))  # tokens 0-4, 4-7, 0-3
    assert cut_up.turn_ends.tolist() == [2, 1, 3, 3]
    assert cut_up.turn_offsets.tolist() == [0, 1, 3, 4]
    together = rows_of(documents(**turns), seq_len=12)
    assert together.turn_ends.tolist() == [2, 5, 7, 10]


def test_turns_in_rows_in_another_order_belong_to_their_segments():
    turns = {"turn_ends": np.array([2, 5, 7, 3], np.int32), "turn_offsets": np.array([0, 3, 4])}
    segments = Segments(np.array([1, 0]), np.array([0, 0]), np.array([3, 7]))
    bins = PACKERS["next-fit"](segments.length, 10)
    rows = assemble_rows(documents(**turns), segments, bins, Layout(seq_len=10, max_token_id=99))
    assert rows.turn_ends.tolist() == [3, 5, 8, 10]


def test_weights_stand_at_targets_only_and_are_summed_by_row():
    weights = np.where(MASK, [9, 1, 2, 9, 0.5, 1, 4, 9, 9, 3], 0).astype(np.float16)
    rows = rows_of(documents(loss_weights=weights), loss_weights=True)
    assert rows.loss_weights.tolist() == [0, 1, 2, 0, 0, 1, 4, 0, 0, 3], "the cut takes the 0.5 with its target"
    assert rows.weight_sum.tolist() == [3.0, 5.0, 3.0]
    plain = rows_of(documents(), loss_weights=True)
    assert plain.loss_weights.tolist() == rows.loss_mask.tolist()
    assert rows_of(documents()).loss_weights is None


@pytest.mark.parametrize("align", [1, 4])
def test_aligned_segments_are_padded_and_keep_their_real_lengths(align):
    rows = rows_of(documents(), seq_len=8, align=align)
    assert rows.segment_lens.tolist() == [7, 3]
    assert rows.num_tokens.tolist() == [7, 3]
    lengths = [7, 3] if align == 1 else [8, 4]
    assert rows.max_seqlen.tolist() == lengths
    assert rows.attention_pairs.tolist() == [n * (n + 1) // 2 for n in lengths]
    assert rows.token_offsets.tolist() == [0, lengths[0], sum(lengths)]
    first = slice(0, lengths[0])
    assert rows.input_ids[first].tolist() == [*range(10, 17), *[0] * (align > 1)]
    assert rows.position_ids[first].tolist() == [*range(lengths[0])]
    assert rows.loss_mask[first].tolist() == [*MASK[:7].tolist(), *[0] * (align > 1)]


@pytest.mark.parametrize("targets", [255, 256, 257, 600])
def test_more_than_255_targets_of_a_document_are_counted(targets):
    mask = (np.arange(700) < targets + 1).astype(np.uint8)  # the first token is no target
    document = Documents(np.zeros(700, np.int32), np.array([0, 700]), np.zeros(1, np.int64), mask)
    assert count_targets(mask, np.zeros(1, np.int64), np.full(1, 700)).tolist() == [targets]
    segments = Segments(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 700))
    bins = PACKERS["next-fit"](segments.length, 1024)
    rows = assemble_rows(document, segments, bins, Layout(seq_len=1024, max_token_id=99))
    assert (rows.num_targets.tolist(), rows.num_target_segments.tolist()) == ([targets], [1])
