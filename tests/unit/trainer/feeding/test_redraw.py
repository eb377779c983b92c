"""Packs drawn anew: every pass holds every segment once, as the shards hold it, in other company."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

from shards import Dataset, OptionError, PackError
from trainer.feeding.redraw import RedrawnPacks
from trainer.loader import PackLoader

Segment = tuple[tuple[int, ...], tuple[int, ...]]
"Ids, and which of them are targets."


def segments_of(ids: Any, mask: Any, bounds: Any) -> Iterator[Segment]:
    for start, stop in pairwise(bounds):
        yield tuple(ids[start:stop].tolist()), tuple(mask[start:stop].tolist())


def stored(dataset: Dataset) -> Counter[Segment]:
    return Counter(
        segment for row in dataset for segment in segments_of(row["input_ids"], row["loss_mask"], row["cu_seqlens"])
    )


@pytest.fixture
def mixed(make_dataset: Callable[..., Dataset], documents: Callable[..., Any]) -> Dataset:
    """Two sources, documents of few lengths, some of them cut."""
    sources = {"web": documents(150, 30, seed=1, shortest=3), "code": documents(60, 70, seed=2, shortest=5)}
    return make_dataset(sources, 48)


@pytest.mark.parametrize("packer", ["auto", "ffd", "bfd"])
def test_every_pass_holds_every_segment_once_and_as_many_packs(make_dataset, documents, packer):
    dataset = make_dataset({"web": documents(300, 60)}, 48, packer)
    drawn = RedrawnPacks(dataset, seed=5)
    assert len(drawn) == len(dataset)
    before: set[frozenset[int]] = set()
    for number in range(4):
        packs = [number * len(drawn) + pack for pack in range(len(drawn))]
        held = [drawn.segments(pack).tolist() for pack in packs]
        assert sorted(segment for pack in held for segment in pack) == list(range(dataset.index.num_segments.sum()))
        found: Counter[Segment] = Counter()
        for pack in packs:
            row = drawn.pack(pack)
            assert 0 < len(row.input_ids) <= 48
            found.update(segments_of(row.input_ids, row.loss_mask, row.cu_seqlens))
        assert found == stored(dataset)
        together = {frozenset(pack) for pack in held if len(pack) > 1}
        assert len(together & before) < len(together) / 2, "most packs are others"
        before = together


def test_a_pack_is_its_segments_end_to_end(mixed):
    drawn = RedrawnPacks(mixed, seed=0)
    for pack in range(0, 3 * len(drawn), 7):
        row, places = drawn.pack(pack), [drawn.stored(segment) for segment in drawn.segments(pack).tolist()]
        pieces = [(mixed[where], *mixed[where]["cu_seqlens"][place : place + 2].tolist()) for where, place in places]
        for name in ("input_ids", "position_ids", "loss_mask"):
            expected = np.concatenate([piece[name][start:stop] for piece, start, stop in pieces])
            assert getattr(row, name).tolist() == expected.tolist()
            assert getattr(row, name).dtype == expected.dtype
        assert row.cu_seqlens.tolist() == np.cumsum([0, *(stop - start for _, start, stop in pieces)]).tolist()
        assert [drawn.segment_at(*place) for place in places] == drawn.segments(pack).tolist()
        assert {drawn.pack_with(segment, pack // len(drawn)) for segment in drawn.segments(pack).tolist()} == {pack}


@pytest.mark.parametrize("weighted", [False, True])
def test_figures_of_drawn_packs_are_those_of_their_tokens(make_dataset, documents, weighted):
    weigh = (lambda number: np.linspace(0.5, 2.0, number)) if weighted else None
    dataset = make_dataset({"web": documents(100, 40)}, 48, weigh=weigh)
    drawn = RedrawnPacks(dataset, seed=1)
    packs = np.arange(2 * len(drawn))
    found = drawn.take(packs)
    for number, pack in enumerate(packs.tolist()):
        row = drawn.pack(pack)
        lengths = np.diff(row.cu_seqlens)
        targets = [int(sum(mask)) for _, mask in segments_of(row.input_ids, row.loss_mask, row.cu_seqlens)]
        assert found.num_tokens[number] == len(row.input_ids)
        assert found.num_segments[number] == len(lengths)
        assert found.num_targets[number] == sum(targets)
        assert found.num_target_segments[number] == sum(count > 0 for count in targets)
        assert found.max_seqlen[number] == max(lengths)
        assert found.attention_pairs[number] == sum(n * (n + 1) // 2 for n in lengths.tolist())
        if weighted:
            assert row.loss_weights is not None
            assert found.weight_sum[number] == pytest.approx(row.loss_weights.astype(np.float64).sum())
    for name, column in drawn.index.columns().items():
        assert column.tolist() == found.columns()[name][: len(drawn)].tolist()


@pytest.mark.parametrize("order", ["shuffled", "cost-grouped"])
def test_an_epoch_serves_every_segment_once_and_the_next_one_in_other_packs(mixed, order):
    loader = PackLoader(mixed, packs_per_step=4, order=order, last_step="drop", repack=True, seed=7)
    assert loader.steps_per_epoch == len(mixed) // 4
    batches: list[list[Segment]] = []
    for epoch in range(3):
        held: Counter[Segment] = Counter()
        for batch in loader:
            bounds = batch["cu_seqlens"].tolist()
            labels = np.concatenate([[-100], batch["shift_labels"][0].numpy()[:-1]])
            ids = batch["input_ids"][0].numpy()
            batches.append(list(segments_of(ids, (labels != -100).astype(int), np.array(bounds))))
            held.update(batches[-1])
        assert held.total() <= stored(mixed).total()
        assert not held - stored(mixed)
        assert loader.steps_taken == (epoch + 1) * loader.steps_per_epoch
    half = loader.steps_per_epoch
    assert {frozenset(batch) for batch in batches[:half]} != {frozenset(batch) for batch in batches[half : 2 * half]}


def test_a_step_is_the_same_packs_and_divisor_at_any_world_size(mixed):
    settings: dict[str, Any] = {"packs_per_step": 8, "repack": True, "last_step": "pad"}
    whole = PackLoader(mixed, **settings)
    assert whole.drawn is not None
    for world in (1, 2, 4):
        views = [PackLoader(mixed, rank=rank, world_size=world, **settings) for rank in range(world)]
        for number in range(3 * whole.steps_per_epoch):
            steps = [view.step_at(number) for view in views]
            packs = [int(pack) for step in steps for batch in step.batches for pack in batch]
            assert sorted(packs) == sorted(whole.packs_of(number).tolist())
            targets = sum(int(whole.drawn.pack(pack if pack >= 0 else ~pack).loss_mask.sum()) for pack in packs)
            assert {step.num_targets for step in steps} == {targets}


def test_a_loader_goes_on_in_the_middle_of_any_epoch(mixed):
    first = PackLoader(mixed, packs_per_step=4, repack=True, seed=2)
    numbers = [batch["input_ids"].flatten().tolist() for batch in islice(first.forever(), 5 * len(first) // 2)]
    for taken in (1, first.steps_per_epoch, first.steps_per_epoch + 3):
        again = PackLoader(mixed, packs_per_step=4, repack=True, seed=2)
        again.load_state_dict(json.loads(json.dumps(first.state_at(taken))))
        found = [batch["input_ids"].flatten().tolist() for batch in islice(again.forever(), 6)]
        begin = taken * first.batches_per_step
        assert found == numbers[begin : begin + 6]


def test_a_mix_serves_each_pass_over_a_source_whole(mixed):
    loader = PackLoader(mixed, packs_per_step=1, repack=True, mix=(("web", 1.0), ("code", 3.0)), mix_stop="first")
    drawn, size = loader.drawn, len(mixed)
    assert drawn is not None
    served = [pack for number in range(4 * loader.steps_per_epoch) for pack in loader.packs_of(number).tolist()]
    for packs in (range(first, stop) for _, first, stop in drawn.sources):
        mine = [pack for pack in served if pack % size in packs]
        whole = len(mine) // len(packs)
        for number in range(whole):
            part = mine[number * len(packs) : (number + 1) * len(packs)]
            assert len({pack % size for pack in part}) == len(packs)
        assert {pack // size for pack in mine} == set(range(-(-len(mine) // len(packs))))


@pytest.mark.parametrize("packer", ["next-fit", "bucketed", "unpacked"])
def test_packs_that_follow_the_order_of_documents_are_refused(make_dataset, documents, packer):
    dataset = make_dataset({"web": documents(40, 40)}, 48, packer)
    with pytest.raises(OptionError, match=f'packer="{packer}"` follow from the order of its documents'):
        PackLoader(dataset, repack=True)


def test_orders_of_shards_are_refused(mixed):
    with pytest.raises(OptionError, match="block-shuffled follows the shards as they are"):
        PackLoader(mixed, order="block-shuffled", repack=True)


def test_a_state_of_stored_packs_is_not_gone_on_with(mixed):
    for before in (False, True):
        state = PackLoader(mixed, repack=before).state_dict()
        with pytest.raises(PackError, match=f"the checkpoint has repack {before}, this run has {not before}"):
            PackLoader(mixed, repack=not before).load_state_dict(state)


def test_the_share_of_segments_that_can_change_places_is_that_of_equal_lengths_in_a_window(make_dataset):
    lengths = {"web": [5, 5, 9, 11, 5], "code": [9, 7, 7]}  # 9 stands once in each window
    sources = {name: [([1] * n, [0] + [1] * (n - 1)) for n in each] for name, each in lengths.items()}
    assert RedrawnPacks(make_dataset(sources, 16), seed=0).share_movable == 5 / 8
