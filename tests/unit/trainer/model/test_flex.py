"""Block masks by interval arithmetic, and FlexAttention's forward against the segment loop."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.backends import flex
from trainer.model.backends.interface import Needs
from trainer.model.backends.registry import ATTENTION_BACKENDS

LENGTHS = [3, 200, 0, 1, 130, 64, 0]


def offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    window=st.one_of(st.none(), st.integers(1, 14)),
    block=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_blocks_are_touched_and_seen_whole_as_the_pairs_say(lengths: list[int], window: int | None, block: int) -> None:
    total, cu = sum(lengths), offsets(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    behind = np.arange(total)[:, None] - np.arange(total)
    visible = (document[:, None] == document) & (behind >= 0) & (behind < (window or total))
    first, whole, last = flex.plan_blocks(cu, window, block)
    assert len(first) == -(-total // block)
    for i, j in itertools.product(range(len(first)), repeat=2):
        pairs = visible[i * block : (i + 1) * block, j * block : (j + 1) * block]
        assert (first[i] <= j <= last[i]) == bool(pairs.any())
        if whole[i] <= j < last[i]:
            assert pairs.all()
        elif j < i:
            assert not pairs.all()


@pytest.mark.parametrize("window", [None, 1, 50, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_its_forward_gives_the_numbers_of_the_segment_loop(
    window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), 4, 16), (sum(LENGTHS), 2, 16), (sum(LENGTHS), 2, 8)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    cu = torch.from_numpy(offsets(LENGTHS))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow without a compiler
        ours = ATTENTION_BACKENDS["flex"](q, k, v, cu, 200, window, 0.3, softcap, sinks)
    expected = ATTENTION_BACKENDS["cpu"](q, k, v, cu, 200, window, 0.3, softcap, sinks)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_it_is_never_chosen_on_a_cpu() -> None:
    needs = Needs(device=torch.device("cpu"), dtype=torch.float32, head_dim=16, value_dim=16)
    assert ATTENTION_BACKENDS["flex"].unsupported_reason(needs) == "has no backward on cpu"
