"""Every packer keeps its promises on any lengths; first-fit and best-fit equal their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.packing.packers import PACKERS, Bins, lower_bound

SEQ_LEN = 100
some_lengths = st.lists(st.integers(1, SEQ_LEN), max_size=200)
limits = st.none() | st.integers(1, 5)


def packed(name: str, lengths: list[int], seq_len: int = SEQ_LEN, **options: int | None) -> Bins:
    return PACKERS[name](np.array(lengths, dtype=np.int32), seq_len, **options)


def contents(bins: Bins, lengths: list[int]) -> list[list[int]]:
    parts = np.split(bins.order, bins.offsets[1:-1]) if bins.num_bins else []
    return [[lengths[i] for i in part] for part in parts]


@pytest.mark.parametrize("name", sorted(PACKERS))
@given(lengths=some_lengths, limit=limits, seed=st.integers(0, 3))
def test_every_segment_lands_in_exactly_one_bin_and_no_bin_overflows(name, lengths, limit, seed):
    bins = packed(name, lengths, max_segments=limit, seed=seed)
    assert sorted(bins.order.tolist()) == list(range(len(lengths)))
    assert bins.order.dtype == bins.offsets.dtype == np.int64
    assert (bins.offsets[0], bins.offsets[-1]) == (0, len(lengths))
    assert (np.diff(bins.offsets) > 0).all(), "an empty bin"
    for held in contents(bins, lengths):
        assert sum(held) <= SEQ_LEN
        assert limit is None or len(held) <= limit


@pytest.mark.parametrize("name", sorted(PACKERS))
@given(lengths=some_lengths, limit=limits, seed=st.integers(0, 2**70))
def test_the_same_seed_gives_the_same_bins(name, lengths, limit, seed):
    first, second = (packed(name, lengths, max_segments=limit, seed=seed) for _ in range(2))
    assert np.array_equal(first.order, second.order)
    assert np.array_equal(first.offsets, second.offsets)


@pytest.mark.parametrize("name", ["auto", "bfd", "bucketed", "ffd"])
@given(data=st.data(), lengths=some_lengths, limit=limits)
def test_the_order_of_the_input_changes_no_bin(name, data, lengths, limit):
    shuffled = data.draw(st.permutations(lengths))
    before = contents(packed(name, lengths, max_segments=limit), lengths)
    after = contents(packed(name, shuffled, max_segments=limit), shuffled)
    if name == "bucketed":  # segments of one padded length come in any order
        before, after = ([[-(-held[0] // 64)] for held in bins] for bins in (before, after))
    assert before == after


@given(lengths=some_lengths)
def test_next_fit_and_unpacked_keep_corpus_order(lengths):
    for name in ("next-fit", "unpacked"):
        assert packed(name, lengths).order.tolist() == list(range(len(lengths)))


@given(lengths=some_lengths, limit=limits)
def test_auto_needs_no_more_bins_than_first_fit_and_none_needs_fewer_than_the_bound(lengths, limit):
    counts = {name: packed(name, lengths, max_segments=limit).num_bins for name in PACKERS}
    assert counts["auto"] <= min(counts["ffd"], counts["bfd"])
    assert min(counts.values()) >= lower_bound(np.array(lengths, np.int32), SEQ_LEN, limit)


def fewest_bins(lengths: tuple[int, ...], seq_len: int, limit: int | None) -> int:
    """The optimum, by trying every bin for every segment."""
    best = len(lengths)

    def place(left: tuple[int, ...], bins: tuple[tuple[int, int], ...]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if not left:
            best = len(bins)
            return
        for i, (room, held) in enumerate(bins):
            if room >= left[0] and (limit is None or held < limit):
                place(left[1:], (*bins[:i], (room - left[0], held + 1), *bins[i + 1 :]))
        place(left[1:], (*bins, (seq_len - left[0], 1)))

    place(tuple(sorted(lengths, reverse=True)), ())
    return best


@given(lengths=st.lists(st.integers(1, 12), max_size=7).map(tuple), limit=limits)
def test_the_bound_and_auto_enclose_the_optimum(lengths, limit):
    optimum = fewest_bins(lengths, 12, limit)
    assert lower_bound(np.array(lengths, np.int32), 12, limit) <= optimum
    assert packed("auto", list(lengths), 12, max_segments=limit).num_bins >= optimum


def reference(lengths: list[int], seq_len: int, limit: int | None, best: bool) -> list[tuple[int, int]]:
    """First-fit (or best-fit) decreasing by definition: room and segments of every bin."""
    bins: list[tuple[int, int]] = []
    for length in sorted(lengths, reverse=True):
        fits = [i for i, (room, held) in enumerate(bins) if room >= length and (limit is None or held < limit)]
        if not fits:
            bins.append((seq_len, 0))
            fits = [len(bins) - 1]
        i = min(fits, key=lambda i: (bins[i][0], i)) if best else fits[0]
        bins[i] = (bins[i][0] - length, bins[i][1] + 1)
    return sorted(bins)


def instances():
    """Random and hostile instances: (lengths, seq_len, limit)."""
    rng = np.random.default_rng(0)
    for seq_len in (1, 2, 7, 60, 1000):
        for lengths in (
            [],
            [1],
            [seq_len],
            [1] * 50,
            [seq_len] * 9,
            [max(1, seq_len // 2)] * 31,
            [seq_len // 2 + 1] * 9,
        ):
            yield lengths, seq_len, None
    eps = 1
    for m in (1, 2, 5):  # the 11/9 instance
        yield [501 + eps] * 6 * m + [252] * 6 * m + [251] * 6 * m + [248] * 12 * m, 1002, None
    for number in range(2000):
        seq_len = int(rng.choice([8, 30, 100, 1000]))
        n = int(rng.integers(0, 45))
        top = int(rng.choice([seq_len, max(1, seq_len // 2), max(1, seq_len // 3), 3]))
        low = int(rng.choice([1, max(1, top // 3)]))
        lengths = rng.integers(low, top, n, endpoint=True)
        if number % 3 == 0:  # few distinct lengths: long runs, many ties
            lengths = rng.choice(rng.integers(low, top, 4, endpoint=True), n)
        yield lengths.tolist(), seq_len, None if number % 2 else int(rng.integers(1, 6))


@pytest.mark.parametrize(("name", "best"), [("ffd", False), ("bfd", True)])
def test_first_fit_and_best_fit_equal_their_definition(name, best):
    compared = 0
    for lengths, seq_len, limit in instances():
        held = contents(packed(name, lengths, seq_len, max_segments=limit), lengths)
        rooms = sorted((seq_len - sum(segments), len(segments)) for segments in held)
        assert rooms == reference(lengths, seq_len, limit, best), (lengths, seq_len, limit)
        compared += 1
    assert compared > 2000
