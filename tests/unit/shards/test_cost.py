"""Costs from their definitions: pairs counted one by one, lengths rounded up by hand."""

import pickle

import numpy as np
import pytest

from shards.cost import ModelCost, attention_pairs, cost_class, padded_length
from shards.errors import OptionError


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_attention_pairs_are_the_keys_that_each_query_sees(window):
    lengths = np.array([1, 3, 4, 9, 11], np.int32)
    by_hand = [sum(min(query + 1, window or query + 1) for query in range(n)) for n in lengths]
    assert attention_pairs(lengths, window).tolist() == by_hand
    assert attention_pairs(lengths, window).dtype == np.int64
    assert attention_pairs(lengths.astype(float), window).tolist() == by_hand


def test_pairs_of_the_longest_rows_do_not_overflow_32_bits():
    assert attention_pairs(np.array([1 << 20], np.int32)).tolist() == [(1 << 20) * ((1 << 20) + 1) // 2]


def test_padded_lengths_are_multiples_of_64_and_end_at_seq_len():
    assert padded_length(np.array([1, 64, 65, 129, 199, 200], np.int32), 200).tolist() == [64, 64, 128, 192, 200, 200]


def test_cost_classes_are_quarter_octaves_of_attention_pairs():
    assert cost_class(np.array([1, 2, 4, 16, 1 << 40])).tolist() == [0, 4, 8, 16, 160]
    many = np.unique(np.geomspace(1, 2**60, 4000).astype(np.int64))
    exact = [sum(int(p) ** 4 >= 1 << k for k in range(1, 241)) for p in many]  # p >= 2^(k/4) in integers
    assert cost_class(many).tolist() == exact


def test_flops_of_segments_are_the_sum_over_tokens_and_pairs():
    cost = ModelCost(per_token=10.0, per_pair=3.0, per_window_pair=2.0, sliding_window=2)
    # two segments of 3 tokens: 6 pairs each, 1 + 2 + 2 inside the window
    assert cost.flops_of(np.array([3.0]), np.array([2.0])) == 2 * (10 * 3 + 3 * 6 + 2 * 5)


def test_an_option_is_named_as_its_caller_knows_it():
    error = OptionError("packs_per_step", "9; expected a multiple of 2.")
    assert str(error) == "`packs_per_step`: 9; expected a multiple of 2."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
