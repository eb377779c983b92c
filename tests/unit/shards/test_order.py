"""Which packs make which step: every pack served, steps that no world size changes, ranks that take equally long."""

import json
import pickle
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from shards.cost import pack_costs
from shards.errors import PackError
from shards.ordering.step_order import StepOrder, balance, straggler_factor


def index_of(num_packs=103, seed=0, tokens=None):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(500, 1000, num_packs) if tokens is None else np.array(tokens)
    longest = rng.integers(1, tokens + 1)
    pairs = longest * (longest + 1) // 2 + tokens
    return SimpleNamespace(num_tokens=tokens, num_targets=tokens // 2, attention_pairs=pairs.astype(np.int64))


def epoch_of(order, epoch=0):
    return [order.step_packs(epoch, step).tolist() for step in range(order.steps_per_epoch)]


def served(order, epoch=0):
    return [pack for step in epoch_of(order, epoch) for pack in step]


@pytest.mark.parametrize("kind", ["shuffled", "cost-grouped"])
def test_an_epoch_serves_every_pack_once_but_those_it_reports(kind):
    dropping = StepOrder(index_of(103), packs_per_step=8, order=kind)
    assert (dropping.steps_per_epoch, dropping.dropped, dropping.repeated) == (12, 7, 0)
    assert len(set(served(dropping))) == len(served(dropping)) == 96
    padding = StepOrder(index_of(103), packs_per_step=8, order=kind, last_step="pad")
    assert (padding.steps_per_epoch, padding.dropped, padding.repeated) == (13, 0, 1)
    assert set(served(padding)) == set(range(103))
    assert len(served(padding)) == 104


def test_padding_repeats_the_start_of_the_same_epoch():
    packs = served(StepOrder(index_of(10), packs_per_step=4, last_step="pad"))
    assert packs[10:] == packs[:2]
    tiny = served(StepOrder(index_of(3), packs_per_step=8, last_step="pad"))
    assert tiny == (tiny[:3] * 3)[:8]


@pytest.mark.parametrize("kind", ["shuffled", "cost-grouped"])
def test_each_epoch_has_an_order_of_its_own_and_a_seed_repeats_it(kind):
    order, again = (StepOrder(index_of(200), packs_per_step=8, order=kind, seed=4) for _ in range(2))
    other = StepOrder(index_of(200), packs_per_step=8, order=kind, seed=5)
    assert epoch_of(order, 0) != epoch_of(order, 1)
    assert sorted(served(order, 0)) == sorted(served(order, 1)) == list(range(200))
    assert epoch_of(order, 0) != epoch_of(other, 0)
    assert [epoch_of(again, epoch) for epoch in (1, 0)] == [epoch_of(order, epoch) for epoch in (1, 0)]


def test_packs_that_fill_no_step_are_others_each_epoch():
    order = StepOrder(index_of(11), packs_per_step=8)
    left_out = [frozenset(range(11)) - set(served(order, epoch)) for epoch in range(20)]
    assert len(set(left_out)) > 10


def test_any_step_is_found_without_those_before_it():
    order = StepOrder(index_of(500), packs_per_step=8, seed=1)
    expected = [epoch_of(order, 0), epoch_of(order, 1)]
    state = json.loads(json.dumps({"epoch": 1, "step": 40}))
    resumed = pickle.loads(pickle.dumps(StepOrder(index_of(500), packs_per_step=8, seed=1)))
    assert resumed.step_packs(state["epoch"], state["step"]).tolist() == expected[1][40]


@pytest.mark.parametrize("kind", ["shuffled", "cost-grouped"])
def test_a_step_holds_the_same_packs_on_any_number_of_ranks(kind):
    order = StepOrder(index_of(500), packs_per_step=24, packs_per_batch=2, order=kind)
    for world_size in (1, 2, 3, 4, 6, 12):
        ranks = order.batches(2, 3, world_size)
        assert len(ranks) == world_size
        assert {len(rank) for rank in ranks} == {12 // world_size}
        assert {len(batch) for rank in ranks for batch in rank} == {2}
        packs = [pack for rank in ranks for batch in rank for pack in batch.tolist()]
        assert sorted(packs) == sorted(order.step_packs(2, 3).tolist())


def test_cost_grouped_steps_hold_neighbours_in_cost_and_come_shuffled():
    index = index_of(800)
    order = StepOrder(index, packs_per_step=8, order="cost-grouped")
    costs = pack_costs(index.num_tokens, index.attention_pairs)
    ranges = sorted((costs[step].min(), costs[step].max()) for step in epoch_of(order))
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    means = [costs[step].mean() for step in epoch_of(order)]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3


def test_heavy_and_light_packs_are_balanced_to_every_rank():
    # four packs of 4,096 tokens: two hold one document, two hold eight of 512
    pairs = np.array([4096 * 4097 // 2, 4096 * 4097 // 2, 8 * 512 * 513 // 2, 8 * 512 * 513 // 2])
    costs = pack_costs(np.full(4, 4096), pairs)
    balanced = balance(costs, 2, 2)
    assert balanced.shape == (2, 2, 1)
    assert {tuple(sorted(rank.ravel() // 2)) for rank in balanced} == {(0, 1)}


@pytest.mark.parametrize(("world_size", "micro_batches", "k"), [(1, 1, 1), (3, 4, 1), (4, 2, 3), (8, 1, 2), (1, 5, 2)])
def test_the_deal_fills_every_slot_once_and_evens_out_cost(world_size, micro_batches, k):
    rng = np.random.default_rng(0)
    costs = rng.lognormal(0, 0.5, (20, world_size * micro_batches * k))
    balanced = balance(costs, world_size, micro_batches, k)
    assert balanced.shape == (20, world_size, micro_batches, k)
    assert (np.sort(balanced.reshape(20, -1)) == np.arange(costs.shape[1])).all()
    for step in range(20):  # a step alone is balanced as it is among others
        assert np.array_equal(balance(costs[step], world_size, micro_batches, k), balanced[step])

    def factor(slots):
        work = np.take_along_axis(costs, slots.reshape(20, -1), 1).reshape(20, world_size, -1).sum(-1)
        return (work.max(-1) / work.mean(-1)).mean()

    assert straggler_factor(costs, world_size, k) == pytest.approx(factor(balanced))
    as_they_come = np.broadcast_to(np.arange(costs.shape[1]), costs.shape)
    assert factor(balanced) <= factor(as_they_come)
    if micro_batches * k >= 4 and world_size > 1:
        assert factor(balanced) - 1 < 0.35 * (factor(as_they_come) - 1)


def lognormal_packs(num_packs=20_000, seq_len=8192):
    """Packs of lognormal documents laid end to end, each about `seq_len` tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(300), 1.0, 20 * num_packs), 1, seq_len).astype(np.int64)
    pack = np.cumsum(lengths) // seq_len
    tokens, pairs = (np.bincount(pack, values)[:num_packs] for values in (lengths, lengths * (lengths + 1) // 2))
    return SimpleNamespace(num_tokens=tokens, num_targets=tokens, attention_pairs=pairs.astype(np.int64))


def test_sixty_four_ranks_wait_for_nobody_when_steps_hold_like_cost():
    index = lognormal_packs()
    grouped, shuffled = (StepOrder(index, packs_per_step=64, order=kind) for kind in ("cost-grouped", "shuffled"))
    assert grouped.straggler_factor(0, 64) <= 1.02
    assert shuffled.straggler_factor(0, 64) > 1.1
    assert StepOrder(index, packs_per_step=8 * 64).straggler_factor(0, 64) <= 1.02


def rectangles(order, epoch=0, world_size=1):
    return [
        batch
        for step in range(order.steps_per_epoch)
        for rank in order.batches(epoch, step, world_size)
        for batch in rank
    ]


def bucketed_index(num_rows=10_000):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1.0, num_rows), 1, 2048).astype(np.int64)
    padded = np.minimum(-(-lengths // 64) * 64, 2048).astype(np.int32)
    pairs = lengths * (lengths + 1) // 2
    return SimpleNamespace(num_tokens=lengths, num_targets=lengths, attention_pairs=pairs), padded


@pytest.mark.parametrize("kind", ["shuffled", "cost-grouped"])
def test_bucketed_steps_are_rectangles_within_the_token_budget(kind):
    index, padded = bucketed_index()
    order = StepOrder(index, packs_per_step=16, packs_per_batch=2, padded_len=padded, tokens_per_batch=4096, order=kind)
    batches = rectangles(order, world_size=4)
    assert order.dropped < 8
    assert {len(order.batches(0, 5, 4)[rank]) for rank in range(4)} == {2}
    for batch in batches:
        assert len(set(padded[batch].tolist())) == 1
        assert len(batch) * padded[batch[0]] <= 4096
    rows = np.concatenate(batches)
    assert len(set(rows.tolist())) == len(rows)
    assert len(rows) > 10_000 - 8 * 64
    assert len(rectangles(order, epoch=1)) == len(batches)
    together, again = ({frozenset(batch.tolist()) for batch in rectangles(order, epoch)} for epoch in (0, 1))
    assert len(together & again) < 10, "rows meet other rows in the next epoch"
    full = sum(len(batch) == 4096 // padded[batch[0]] for batch in batches)
    assert full >= len(batches) - 32, "more than one short rectangle a bucket"


def test_lengths_of_bucketed_steps_do_not_arrive_sorted():
    index, padded = bucketed_index()
    order = StepOrder(index, packs_per_step=2, packs_per_batch=2, padded_len=padded, tokens_per_batch=4096)
    lengths = [padded[batch[0]] for batch in rectangles(order)]
    assert len(lengths) > 500
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.2


def test_largest_first_puts_the_costliest_rectangle_into_the_first_batch():
    index, padded = bucketed_index()
    options = {"packs_per_step": 8, "packs_per_batch": 2, "padded_len": padded, "tokens_per_batch": 4096}
    firsts = [StepOrder(index, **options, largest_first=largest).batches(0, 0, 2)[0][0] for largest in (True, False)]
    assert (padded[firsts[0][0]], len(firsts[0])) == (2048, 2)
    assert padded[firsts[1][0]] < 2048


SOURCES = [("web", 0, 1000), ("code", 1000, 1300), ("web", 1300, 1500), ("law", 1500, 2500)]


def mixed(index=None, **options):
    return StepOrder(index or index_of(2500), packs_per_step=10, sources=SOURCES, **options)


def shares(packs, amounts, names=("web", "code", "law")):
    by = {name: sum(amounts[p] for s, a, b in SOURCES if s == name for p in packs if a <= p < b) for name in names}
    return {name: amount / sum(by.values()) for name, amount in by.items()}


@pytest.mark.parametrize("by", ["tokens", "targets", "packs"])
def test_every_part_of_a_mixed_epoch_has_the_shares_asked_for(by):
    rng = np.random.default_rng(1)
    index = index_of(2500, tokens=np.concatenate([rng.integers(200, 400, 1500), rng.integers(2000, 3500, 1000)]))
    amounts = {"tokens": index.num_tokens, "targets": index.num_targets, "packs": np.ones(2500)}[by]
    packs = served(mixed(index, mix=(("web", 2), ("code", 1), ("law", 1)), mix_by=by, mix_stop="longest"))
    assert len(packs) > 1500
    for part in np.array_split(packs, 5):
        assert shares(part, amounts) == pytest.approx({"web": 0.5, "code": 0.25, "law": 0.25}, abs=0.02)


def test_the_mixed_sequence_takes_the_source_that_is_furthest_behind():
    index = index_of(2500)
    weights = {"web": 0.2, "code": 0.5, "law": 0.3}
    packs = served(mixed(index, mix=tuple(weights.items())))
    source_of = {p: name for name, a, b in SOURCES for p in range(a, b)}
    queues = {name: [p for p in packs if source_of[p] == name] for name in weights}
    done = dict.fromkeys(weights, 0)
    for pack in packs:  # by definition: the next pack of each source, halfway through, against the source's share
        behind = {
            name: (done[name] + index.num_tokens[queue[0]] / 2) / weights[name]
            for name, queue in queues.items()
            if queue
        }
        chosen = min(behind, key=behind.__getitem__)
        assert source_of[pack] == chosen
        done[chosen] += index.num_tokens[queues[chosen].pop(0)]


def test_a_mixed_epoch_ends_with_the_first_or_the_last_source():
    mix = (("web", 0.5), ("code", 0.5))
    first, longest = (mixed(mix=mix, mix_by="packs", mix_stop=stop) for stop in ("first", "longest"))
    assert first.passes == {"web": 300 / 1200, "code": 1.0}
    assert longest.passes == {"web": 1.0, "code": 4.0}
    counts = np.bincount(served(longest), minlength=2500)
    assert (counts[1000:1300] == 4).all()
    assert (np.concatenate([counts[:1000], counts[1300:1500]]) == 1).all()
    assert not counts[1500:].any()


def test_a_source_goes_on_in_the_next_epoch_where_it_stopped():
    order = mixed(mix=(("web", 0.5), ("code", 0.5)), mix_by="packs")
    web = [p for epoch in range(4) for p in served(order, epoch) if not 1000 <= p < 1300]
    assert sorted(web) == [*range(1000), *range(1300, 1500)], "4 epochs of 300 are one pass over 1200 packs"
    assert served(mixed(mix=(("web", 0.5), ("code", 0.5)), mix_by="packs"), 3) == served(order, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sorted"}, "`order`: 'sorted'; expected one of shuffled, cost-grouped"),
        ({"last_step": "keep"}, "`last_step`: 'keep'; expected one of drop, pad"),
        ({"packs_per_step": 9, "packs_per_batch": 2}, "`packs_per_step`: 9; expected a multiple of 2"),
        ({"packs_per_step": 200}, "a step takes 200 packs, an epoch has 103"),
        ({"mix": (("books", 1),), "sources": SOURCES}, "books=1; expected one of the sources web, code, law"),
        ({"mix": (("web", 0),), "sources": SOURCES}, "web=0; expected a finite weight above 0"),
        ({"mix": (("web", float("nan")),), "sources": SOURCES}, "web=nan; expected a finite weight above 0"),
        ({"mix": (("web", 1),), "sources": SOURCES, "order": "cost-grouped"}, "`mix`: gives one sequence"),
        ({"mix": (("web", 1),), "sources": SOURCES, "mix_by": "lines"}, "`mix_by`: 'lines'; expected one of tokens"),
    ],
)
def test_settings_that_do_not_fit_are_named(options, message):
    with pytest.raises(PackError, match=message):
        StepOrder(index_of(103), **{"packs_per_step": 8, **options})


def test_a_step_that_does_not_spread_over_the_ranks_is_refused():
    with pytest.raises(
        PackError, match="does not spread over 3 processes with 2 in a micro-batch; expected a multiple of 6"
    ):
        StepOrder(index_of(103), packs_per_step=8, packs_per_batch=2).batches(0, 0, 3)


def test_a_source_without_what_the_mix_weighs_by_is_refused():
    index = index_of(2500)
    index.num_targets = np.where(np.arange(2500) < 1500, index.num_targets, 0)
    with pytest.raises(PackError, match="source law has no targets"):
        mixed(index, mix=(("web", 1), ("law", 1)), mix_by="targets")
