"""Packers on instances with known answers; what they refuse; how equal lengths are shuffled."""

import subprocess
import sys

import numpy as np
import pytest

import pipeline
import pipeline.packing
from pipeline.packing.packers import PACKERS, histogram_bound, length_histogram, lower_bound
from shards.errors import PackError, SegmentTooLongError


def lengths_of(name, n, seq_len, seed=0):
    rng = np.random.default_rng(seed)
    if name == "mid":  # nothing small to fill gaps with
        lengths = np.clip(rng.lognormal(np.log(0.3 * seq_len), 0.35, n), seq_len // 8, seq_len)
    else:
        lengths = np.clip(rng.lognormal(np.log(300), 1.0, n), 1, seq_len)
    return lengths.astype(np.int32)


def fill(bins, lengths):
    return np.add.reduceat(lengths[bins.order].astype(np.int64), bins.offsets[:-1])


@pytest.mark.parametrize("name", sorted(PACKERS))
@pytest.mark.parametrize("lengths", [[], [1], [8], [8] * 5, [1] * 20])
def test_the_smallest_and_the_most_uniform_inputs_need_what_the_rule_says(name, lengths):
    bins = PACKERS[name](np.array(lengths, np.int32), 8)
    one_each = name in ("bucketed", "unpacked")
    assert bins.num_bins == (len(lengths) if one_each else -(-sum(lengths) // 8))


@pytest.mark.parametrize("name", sorted(PACKERS))
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([3, 0], r"lengths\[1\]: 0 tokens; expected 1 to 8\."),
        ([-2, 3], r"lengths\[0\]: -2 tokens; expected 1 to 8\."),
        ([3, 3, 9], r"lengths\[2\]: 9 tokens; expected 1 to 8\."),
        ([2**32 + 1], rf"lengths\[0\]: {2**32 + 1} tokens"),
    ],
)
def test_a_length_that_cannot_be_packed_is_named(name, bad, message):
    with pytest.raises(SegmentTooLongError, match=message):
        PACKERS[name](np.array(bad), 8)


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_lengths_that_are_no_flat_array_of_integers_are_refused(name):
    with pytest.raises(PackError, match=r"lengths: float64 of shape \(2,\); expected a flat array of integers"):
        PACKERS[name](np.array([1.0, 2.0]), 8)
    with pytest.raises(PackError, match=r"of shape \(1, 2\)"):
        PACKERS[name](np.array([[1, 2]]), 8)
    with pytest.raises(PackError, match="max_segments: 0; expected at least 1"):
        PACKERS[name](np.array([1, 2]), 8, max_segments=0)


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64])
def test_any_integer_type_gives_the_same_bins(kind):
    lengths = lengths_of("sft", 300, 100)
    expected = PACKERS["auto"](lengths, 100)
    lengths.flags.writeable = False
    for given in (lengths, lengths.astype(kind), np.repeat(lengths, 2)[::2]):
        assert np.array_equal(PACKERS["auto"](given, 100).order, expected.order)


def test_pack_takes_plain_lists_and_the_name_of_a_packer():
    bins = pipeline.pack([7, 3, 6, 4], 10)
    assert (bins.order.tolist(), bins.offsets.tolist()) == ([3, 2, 1, 0], [0, 2, 4])
    assert pipeline.pack([7, 3, 6, 4], 10, packer="unpacked").num_bins == 4
    lengths = lengths_of("sft", 300, 500)
    for seed in (0, 7):
        assert np.array_equal(
            pipeline.pack(lengths, 500, "bfd", seed).order, PACKERS["bfd"](lengths, 500, seed=seed).order
        )
    with pytest.raises(PackError, match=r"packer: 'best'; expected one of auto, ffd, bfd, next-fit, wrapped, bucketed"):
        pipeline.pack([1], 10, packer="best")


def test_the_package_names_what_it_exports():
    assert set(dir(pipeline.packing)) == {"PACKERS", "Bins", "lower_bound", "pack"}
    assert pipeline.packing.PACKERS is pipeline.PACKERS
    with pytest.raises(AttributeError, match=r"'pipeline\.packing' has no attribute 'best'"):
        pipeline.packing.best  # noqa: B018


def test_wrapped_is_next_fit_with_a_cut_policy_of_its_own():
    assert {name: packer.cut_policy for name, packer in PACKERS.items() if packer.cut_policy} == {"wrapped": "wrapped"}
    lengths = lengths_of("sft", 300, 500)
    for one, other in zip(PACKERS["wrapped"](lengths, 500), PACKERS["next-fit"](lengths, 500), strict=True):
        assert np.array_equal(one, other)


def test_first_fit_takes_the_first_bin_that_fits_and_best_fit_the_fullest():
    lengths = np.array([2, 4, 7, 4])  # 7 opens a bin, both 4s the next; there the 2 fits too, and better
    assert sorted(fill(PACKERS["ffd"](lengths, 10), lengths)) == [8, 9]
    assert sorted(fill(PACKERS["bfd"](lengths, 10), lengths)) == [7, 10]


def test_next_fit_closes_a_bin_when_the_next_segment_does_not_fit():
    bins = PACKERS["next-fit"](np.array([5, 5, 3, 8, 1, 1, 1], np.int32), 10)
    assert bins.offsets.tolist() == [0, 2, 3, 6, 7]
    limited = PACKERS["next-fit"](np.array([1, 1, 1, 1, 1]), 10, max_segments=2)
    assert limited.offsets.tolist() == [0, 2, 4, 5]


def test_bucketed_rows_come_by_padded_length():
    lengths = lengths_of("sft", 500, 1000)
    bins = PACKERS["bucketed"](lengths, 1000)
    padded = np.minimum(-(-lengths[bins.order] // 64) * 64, 1000)
    assert bins.num_bins == 500
    assert (np.diff(padded) >= 0).all()
    assert len(np.unique(padded)) > 5


@pytest.mark.parametrize("copies", [1, 7, 1000])
def test_auto_packs_the_eleven_ninths_instance_to_the_bound(copies):
    # 6 bins of (1/2 + e, 1/4 + e, 1/4 - 2e) and 3 of (1/4 + 2e twice, 1/4 - 2e twice) are full; first fit needs 11.
    lengths = np.repeat([1025, 514, 513, 510], [6 * copies, 6 * copies, 6 * copies, 12 * copies])
    assert PACKERS["auto"](lengths, 2048).num_bins == lower_bound(lengths, 2048) == 9 * copies
    assert PACKERS["ffd"](lengths, 2048).num_bins == 11 * copies


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_auto_comes_close_to_the_bound_where_nothing_is_small(seq_len):
    lengths = lengths_of("mid", 100_000, seq_len)
    bound = lower_bound(lengths, seq_len)
    assert PACKERS["bfd"](lengths, seq_len).num_bins > 1.015 * bound
    assert PACKERS["auto"](lengths, seq_len).num_bins <= 1.0015 * bound


def test_auto_reaches_the_bound_on_usual_lengths():
    lengths = lengths_of("sft", 100_000, 2048)
    assert PACKERS["auto"](lengths, 2048).num_bins == lower_bound(lengths, 2048)


def test_auto_searches_within_a_limit_on_segments():
    lengths = lengths_of("mid", 3000, 1000)
    bins = PACKERS["auto"](lengths, 1000, max_segments=3)
    assert np.diff(bins.offsets).max() == 3
    assert fill(bins, lengths).max() <= 1000
    assert bins.num_bins < PACKERS["bfd"](lengths, 1000, max_segments=3).num_bins


def test_the_bound_counts_tokens_large_segments_and_the_limit():
    assert lower_bound(np.zeros(0, np.int32), 10) == 0
    assert lower_bound(np.array([5, 5, 5, 5, 1]), 10) == 3  # 21 tokens
    assert lower_bound(np.array([6, 6, 6]), 10) == 3  # no two share
    assert lower_bound(np.array([7, 7, 4, 4, 4, 4]), 10) == 4  # a 4 fits beside no 7; two 4s share
    assert lower_bound(np.array([1] * 7), 10, max_segments=3) == 3
    assert histogram_bound(length_histogram(np.array([6, 6, 6]), 10)) == 3


@pytest.mark.parametrize("name", ["auto", "bfd", "bucketed", "ffd"])
def test_segments_of_one_length_do_not_come_out_in_corpus_order(name):
    lengths = np.full(1000, 5, np.int32)
    orders = [PACKERS[name](lengths, 10, seed=seed).order for seed in (0, 1)]
    kept = PACKERS[name](lengths, 10, seed=None).order
    assert kept.tolist() == list(range(1000))
    for order in orders:
        correlation = np.corrcoef(order, np.arange(1000))[0, 1]
        assert abs(correlation) < 0.1
    assert not np.array_equal(*orders)


def test_every_place_gets_every_segment_of_its_length_alike():
    lengths = np.full(6, 10, np.int32)  # one segment a bin, so the order is the permutation itself
    seen = np.zeros((6, 6))
    for seed in range(3000):
        seen[np.arange(6), PACKERS["ffd"](lengths, 10, seed=seed).order] += 1
    chi_squared = ((seen - 500) ** 2 / 500).sum()
    assert chi_squared < 60  # 25 degrees of freedom: 60 is exceeded once in 10,000 times


def test_shuffling_leaves_the_lengths_in_every_bin_alone():
    lengths = lengths_of("sft", 2000, 1000)
    dealt, kept = (PACKERS["auto"](lengths, 1000, seed=seed) for seed in (5, None))
    assert np.array_equal(lengths[dealt.order], lengths[kept.order])
    assert not np.array_equal(dealt.order, kept.order)


def test_importing_the_packers_compiles_nothing():
    code = "import sys, pipeline.packing.packers, pipeline.packing.rows; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
