"""Every epoch serves every pack, whatever the sizes; every rank gets the same number of micro-batches."""

from types import SimpleNamespace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from shards.ordering.step_order import LAST_STEPS, ORDERS, StepOrder


@given(
    num_packs=st.integers(1, 120),
    world_size=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    packs_per_batch=st.integers(1, 3),
    kind=st.sampled_from(ORDERS),
    last_step=st.sampled_from(LAST_STEPS),
    padded=st.booleans(),
    largest_first=st.booleans(),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 2**64),
)
def test_an_epoch_serves_each_pack_once_and_all_ranks_alike(
    num_packs, world_size, micro_batches, packs_per_batch, kind, last_step, padded, largest_first, epoch, seed
):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 200, num_packs)
    index = SimpleNamespace(num_tokens=lengths, num_targets=lengths, attention_pairs=lengths * (lengths + 1) // 2)
    per_step = world_size * micro_batches * packs_per_batch
    assume(last_step == "pad" or num_packs >= per_step * 8)
    order = StepOrder(
        index,
        packs_per_step=per_step,
        packs_per_batch=packs_per_batch,
        seed=seed,
        order=kind,
        last_step=last_step,
        padded_len=(-(-lengths // 64) * 64).astype(np.int32) if padded else None,
        tokens_per_batch=256,
        largest_first=largest_first,
    )
    served = np.zeros(num_packs, int)
    units = 0
    for step in range(order.steps_per_epoch):
        ranks = order.batches(epoch, step, world_size)
        assert [len(rank) for rank in ranks] == [micro_batches] * world_size
        packs = np.concatenate([batch for rank in ranks for batch in rank])
        assert sorted(packs) == sorted(order.step_packs(epoch, step))
        np.add.at(served, packs, 1)
        units += order.units_per_step
    if last_step == "pad":
        assert served.min() >= 1
    else:
        assert served.max() == 1
    if not padded:
        assert units == num_packs - order.dropped + order.repeated == served.sum()
        assert order.dropped < per_step
