"""Orders that know shards: every pack once, blocks that stay together, shares that hold, any step by itself."""

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shards.cost import pack_costs
from shards.counts import empty_counts
from shards.errors import OptionError
from shards.ordering.block_order import BlockOrder, meeting_share
from shards.ordering.blocks import Interleaving
from shards.ordering.permutation import KeyedPermutation
from shards.tables.index import Index
from shards.tables.shard_list import ShardList

SOURCES = ("web", "code", "law")


def shard_list(packs: list[int], sources: list[int] | None = None) -> ShardList:
    packs_of = np.array(packs, np.int64)
    columns = {
        "packs": packs_of,
        "first_pack": np.cumsum(packs_of) - packs_of,
        "bytes": np.ones(len(packs), np.int64),
        "source": np.array(sources or [0] * len(packs), np.int32),
    }
    return ShardList(columns, SOURCES, "here")


def index_of(num_packs: int) -> Index:
    rng = np.random.default_rng(0)
    tokens = rng.integers(900, 1000, num_packs).astype(np.int32)
    longest = rng.integers(1, tokens + 1)
    pairs = longest * (longest + 1) // 2 + tokens
    return Index(tokens, tokens, tokens // 2, tokens, tokens, pairs.astype(np.int64))


def order_of(packs: list[int], sources: list[int] | None = None, **options: Any) -> BlockOrder:
    shards = shard_list(packs, sources)
    index = index_of(shards.num_packs)
    counts = []
    for number in range(len(SOURCES)):
        mine = np.repeat(shards.columns["source"], packs) == number
        sheet = empty_counts()
        sheet["tokens"]["packed"], sheet["packs"] = int(index.num_tokens[mine].sum()), int(mine.sum())
        sheet["targets"]["packed"] = int(index.num_targets[mine].sum())
        counts.append(sheet)
    return BlockOrder(shards, index, counts, **{"packs_per_step": 8, "block_shards": 4, **options})


def served(order: BlockOrder, epoch: int = 0) -> list[int]:
    return [pack for step in range(order.steps_per_epoch) for pack in order.step_packs(epoch, step).tolist()]


PACKS = [int(n) for n in np.random.default_rng(1).integers(0, 40, 30)]  # an empty shard among them


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 1000, 4097])
def test_a_keyed_permutation_names_every_number_once(size):
    order = KeyedPermutation(size, (3, 1))(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))
    if size > 60:
        assert order.tolist() != KeyedPermutation(size, (3, 2))(np.arange(size)).tolist()
        assert order[10:20].tolist() == KeyedPermutation(size, (3, 1))(np.arange(10, 20)).tolist()


def test_a_keyed_permutation_is_as_random_as_a_shuffle_in_where_neighbours_go():
    order = KeyedPermutation(10_000, (5,))(np.arange(10_000))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("kind", ["block-shuffled", "block-cost-grouped"])
def test_an_epoch_serves_every_pack_once_but_those_it_reports(kind):
    total = sum(PACKS)
    dropping = order_of(PACKS, order=kind)
    assert (dropping.steps_per_epoch, dropping.dropped) == divmod(total, 8)
    assert len(set(served(dropping))) == len(served(dropping)) == total - dropping.dropped
    padding = order_of(PACKS, order=kind, last_step="pad")
    assert set(served(padding)) == set(range(total))
    assert len(served(padding)) - total == padding.repeated == -total % 8
    assert served(dropping, 0) != served(dropping, 1)


def test_packs_are_shuffled_inside_blocks_of_shards_and_blocks_follow_on_each_other():
    order = order_of(PACKS, packs_per_step=1)
    shard_of = np.repeat(np.arange(len(PACKS)), PACKS)
    shards = shard_of[served(order)]
    first = {shard: int(np.flatnonzero(shards == shard)[0]) for shard in set(shards.tolist())}
    last = {shard: int(np.flatnonzero(shards == shard)[-1]) for shard in set(shards.tolist())}
    for place in range(0, len(shards), 7):
        assert sum(first[shard] <= place <= last[shard] for shard in first) <= 4, "more shards at once than a block"
    runs = sum(int(a != b) for a, b in pairwise(shards.tolist()))
    assert runs > len(shards) / 2, "packs of a block are mixed"


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_nodes_share_out_a_step_evenly_and_each_fetches_few_shards(num_nodes):
    """Four nodes that fetch whole shards fetch at most half as much again as a quarter of the dataset each."""
    packs_per_shard, shards = 100, 400
    order = order_of([packs_per_shard] * shards, packs_per_step=256, block_shards=64)
    fetched: list[set[int]] = [set() for _ in range(num_nodes)]
    for step in range(order.steps_per_epoch):
        expected = order.step_packs(0, step).tolist()
        ranks = order.batches(0, step, 8, num_nodes)
        assert {len(rank) for rank in ranks} == {256 // 8}
        assert sorted(pack for rank in ranks for batch in rank for pack in batch.tolist()) == sorted(expected)
        for node, found in enumerate(fetched):
            for rank in ranks[node * 8 // num_nodes : (node + 1) * 8 // num_nodes]:
                found |= {pack // packs_per_shard for batch in rank for pack in batch.tolist()}
    assert max(map(len, fetched)) <= 1.5 * shards / num_nodes
    again = [order.batches(1, 0, 8, num_nodes) for _ in range(2)]
    assert [[batch.tolist() for batch in rank] for rank in again[0]] == [
        [batch.tolist() for batch in rank] for rank in again[1]
    ]


def test_a_node_keeps_its_part_of_the_shards_in_every_epoch():
    order = order_of([50] * 200, packs_per_step=256, block_shards=64)
    fetched: list[set[int]] = []
    for epoch in range(2):
        mine = [rank for step in range(order.steps_per_epoch) for rank in order.batches(epoch, step, 4, 4)[:1]]
        fetched.append({pack // 50 for rank in mine for batch in rank for pack in batch.tolist()})
    assert len(fetched[0] & fetched[1]) > 0.8 * len(fetched[0])


@pytest.mark.parametrize("kind", ["block-shuffled", "block-cost-grouped"])
def test_any_step_is_found_without_those_before_it_and_whatever_the_ranks(kind):
    order = order_of(PACKS, order=kind, packs_per_step=12, packs_per_batch=2)
    expected = [order.step_packs(epoch, step).tolist() for epoch in (0, 1) for step in range(order.steps_per_epoch)]
    fresh = pickle.loads(pickle.dumps(order_of(PACKS, order=kind, packs_per_step=12, packs_per_batch=2)))
    for number in (len(expected) - 1, 0, order.steps_per_epoch + 3, 5):
        epoch, step = divmod(number, order.steps_per_epoch)
        assert fresh.step_packs(epoch, step).tolist() == expected[number]
        for world_size in (1, 2, 3, 6):
            ranks = order.batches(epoch, step, world_size)
            assert len(ranks) == world_size
            assert sorted(pack for rank in ranks for batch in rank for pack in batch.tolist()) == sorted(
                expected[number]
            )


def test_cost_grouped_steps_inside_a_block_hold_packs_of_like_cost():
    grouped, plain = (order_of([100] * 12, order=kind) for kind in ("block-cost-grouped", "block-shuffled"))
    index = index_of(1200)
    costs = pack_costs(index.num_tokens, index.attention_pairs)

    def spread(order: BlockOrder) -> float:
        return float(np.mean([np.ptp(costs[order.step_packs(0, step)]) for step in range(order.steps_per_epoch)]))

    assert spread(grouped) < spread(plain) / 5
    assert grouped.straggler_factor(0, 8) < plain.straggler_factor(0, 8)


def test_mixed_sources_keep_their_shares_in_every_block():
    sources = [0] * 20 + [1] * 10 + [2] * 5
    packs = [100] * 35
    order = order_of(packs, sources, mix=(("web", 0.7), ("code", 0.3)), mix_by="tokens")
    index, source_of = index_of(3500), np.repeat(sources, packs)
    sequence = np.array(served(order))
    assert set(source_of[sequence].tolist()) == {0, 1}, "a source that is not named stays out"
    for start in range(0, len(sequence) - 400, 400):
        block = sequence[start : start + 400]
        web = index.num_tokens[block][source_of[block] == 0].sum() / index.num_tokens[block].sum()
        assert abs(web - 0.7) < 0.01
    assert order.passes["code"] == pytest.approx(0.858, abs=0.01)  # all of web, 3/7 as many tokens of code


def test_a_mixed_source_goes_on_in_the_next_epoch_where_it_stopped():
    order = order_of([50] * 12, [0] * 6 + [1] * 6, mix=(("web", 0.75), ("code", 0.25)), mix_by="packs")
    code = [pack for epoch in range(3) for pack in served(order, epoch) if pack >= 300]
    assert sorted(code) == list(range(300, 600)), "three epochs of 100 packs are one pass over 300"


@pytest.mark.parametrize("counts", [(3, 1), (700, 300, 7), (5, 5), (1, 1, 1000)])
def test_any_stretch_of_an_interleaving_is_that_of_the_whole(counts):
    mixing = Interleaving(counts)
    total = sum(counts)
    whole, _ = mixing.stretch(0, total)
    assert [int((whole == number).sum()) for number in range(len(counts))] == list(counts)
    dues = sorted(((j + 0.5) / n, number) for number, n in enumerate(counts) for j in range(n))
    assert whole.tolist() == [number for _, number in dues]
    for start in range(0, total, max(1, total // 50)):
        stretch, taken = mixing.stretch(start, min(total, start + 10))
        assert stretch.tolist() == whole[start : start + 10].tolist()
        assert taken.tolist() == [int((whole[:start] == number).sum()) for number in range(len(counts))]


def test_the_share_of_pairs_that_can_meet_grows_to_a_full_shuffle():
    assert meeting_share(np.full(100, 10), 100) == 1.0
    # two packs of 1,000 lie in one block of 100 with a chance of 99 in 999
    assert meeting_share(np.full(100, 10), 10) == pytest.approx(99 / 999)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "shuffled"}, "`order`: 'shuffled'; expected one of block-shuffled, block-cost-grouped"),
        ({"block_shards": 0}, "`shuffle_block_shards`: 0; expected at least 1"),
        ({"packs_per_step": 10_000}, "`packs_per_step`: a step takes 10000 packs, an epoch has"),
        ({"mix": (("books", 1),)}, "`mix`: books=1; expected one of the sources web, code, law"),
        ({"mix": (("law", 1),)}, "`mix`: source law has no tokens"),
        ({"mix": (("web", 1),), "order": "block-cost-grouped"}, "`mix`: gives one sequence of sources"),
    ],
)
def test_settings_that_do_not_fit_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        order_of(PACKS, **options)
