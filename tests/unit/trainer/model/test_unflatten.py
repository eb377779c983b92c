"""Rectangles of segments, and modules that know no boundaries run on them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shards.errors import ModelError
from trainer.model.mixers import find_mixers, leaks, recorded_calls
from trainer.model.rectangles import plan_rectangles
from trainer.model.unflatten import Call, Role, Unflattening, collect, roles_of, spread


def offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any), slack=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_every_token_has_one_slot_and_padding_repeats_the_last_token_of_its_segment(
    lengths: list[int], slack: int
) -> None:
    rectangles, cu = plan_rectangles(offsets(lengths), slack=slack), offsets(lengths)
    tokens, at, seen = rectangles.tokens.tolist(), 0, []
    for rows, width in rectangles.shapes:
        for _ in range(rows):
            row = tokens[at : at + width]
            segment = int(np.searchsorted(cu, row[0], side="right")) - 1
            length = int(cu[segment + 1] - cu[segment])
            assert row == [*range(cu[segment], cu[segment + 1]), *[int(cu[segment + 1]) - 1] * (width - length)]
            seen.append(segment)
            at += width
    assert at == len(tokens)
    assert sorted(seen) == [i for i, length in enumerate(lengths) if length]
    assert torch.equal(rectangles.tokens[rectangles.slots], torch.arange(sum(lengths)))


def test_the_example_of_three_segments_by_hand() -> None:
    rectangles = plan_rectangles(offsets([3, 90, 4]))
    assert rectangles.shapes == ((1, 90), (2, 4))
    assert rectangles.tokens[90:].tolist() == [93, 94, 95, 96, 0, 1, 2, 2]


def test_chat_like_lengths_leave_little_padding_in_few_rectangles() -> None:
    rng = np.random.default_rng(0)
    shares, calls = [], []
    for _ in range(20):
        lengths = np.maximum(2, rng.lognormal(np.log(300), 1.0, 50)).astype(int).tolist()
        rectangles = plan_rectangles(offsets(lengths))
        shares.append(len(rectangles.tokens) / sum(lengths))
        calls.append(len(rectangles.shapes))
    assert np.mean(shares) < 1.15
    assert max(calls) <= 16


@pytest.mark.parametrize(
    ("shape", "role"),
    [((1, 9, 4), Role(1, 0)), ((1, 9), Role(1, 0)), ((1, 2, 9, 4), Role(2, 0)), ((3, 1, 9), Role(2, 1))],
)
def test_collecting_undoes_spreading_and_gradients_are_those_of_the_tokens(shape: tuple[int, ...], role: Role) -> None:
    rectangles = plan_rectangles(offsets([2, 4, 3]), slack=1)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parts = spread(x, role, rectangles)
    assert [part.shape[role.batch_dim or 0] for part in parts] == [rows for rows, _ in rectangles.shapes]
    back = collect([part * 2 for part in parts], role, rectangles)
    assert torch.equal(back, x * 2)
    weights = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(torch.autograd.grad((back * weights).sum(), x)[0], weights * 2)


def test_padding_gives_no_gradient_to_the_token_it_copies() -> None:
    rectangles = plan_rectangles(offsets([2, 3]), slack=2)
    x = torch.zeros(1, 5, 1, dtype=torch.float64, requires_grad=True)
    total = sum(part.sum() for part in spread(x, Role(1, 0), rectangles))
    assert len(rectangles.tokens) == 9
    assert torch.autograd.grad(total, x)[0].flatten().tolist() == [1, 1, 1, 1, 1]


def test_what_all_rows_share_is_read_off_the_longest_segment() -> None:
    rectangles = plan_rectangles(offsets([2, 3]))
    tables = torch.tensor([[0.0], [1.0], [0.0], [1.0], [2.0]])  # positions restart
    assert [part.flatten().tolist() for part in spread(tables, Role(0, None), rectangles)] == [[0, 1, 2], [0, 1]]


def test_boundaries_of_another_row_are_an_error() -> None:
    with pytest.raises(ModelError, match="got 6 tokens under boundaries of 5; expected as many"):
        spread(torch.zeros(1, 6, 2), Role(1, 0), plan_rectangles(offsets([2, 3])))


def test_what_is_per_token_is_what_grew() -> None:
    short = {
        ("x",): torch.zeros(1, 5, 5),
        ("mask",): torch.zeros(1, 1, 5, 5),
        ("w",): torch.zeros(5),
        ("p",): torch.zeros(5),
    }
    long = {
        ("x",): torch.zeros(1, 7, 5),
        ("mask",): torch.zeros(1, 1, 7, 7),
        ("w",): torch.zeros(5),
        ("p",): torch.zeros(7),
    }
    assert roles_of(short, long, (5, 7)) == {("x",): Role(1, 0), ("mask",): None, ("p",): Role(0, None)}


class Recurrence(nn.Module):
    """h[t] = decay * h[t-1] + in(x[t]); y = out(h)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(0.5, 0.95, width))
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, scale: Tensor | None = None, **kwargs: Any) -> Tensor:
        state, out = torch.zeros_like(hidden[:, 0]), []
        for x in self.inner(hidden if scale is None else hidden * scale).unbind(1):
            state = self.decay * state + x
            out.append(state)
        return self.outer(torch.stack(out, 1))


class Layer(nn.Module):
    def __init__(self, width: int, mixer: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), mixer(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, hidden: Tensor, scale: Tensor, **kwargs: Any) -> Tensor:
        hidden = hidden + self.mixer(self.norm(hidden), scale=scale, **kwargs)
        return hidden + self.mlp(hidden)


class Body(nn.Module):
    def __init__(self, mixer: type[nn.Module] = Recurrence) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Layer(6, mixer) for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden, scale = self.words(input_ids), (1 + 0.1 * position_ids)[..., None]
        for layer in self.layers:
            hidden = layer(hidden, scale, **kwargs)
        return hidden


LENGTHS = [3, 1, 7, 4]


def calls_of(body: Body, tokens: int, **kwargs: Any) -> dict[nn.Module, Call]:
    calls: dict[nn.Module, Call] = {}
    with recorded_calls(body, calls), torch.no_grad():
        body((torch.arange(tokens) * 7 % 11)[None], **kwargs)
    return calls


def wrapped(body: Body, names: list[str] | None = None) -> Unflattening:
    unflattening = Unflattening()
    short, long = calls_of(body, 9), calls_of(body, 13)
    with torch.no_grad():
        mixers = find_mixers(body, short, long, (9, 13), set())
    for name in mixers if names is None else names:
        module = body.get_submodule(name)
        unflattening.wrap(module, name, short[module], long[module], (9, 13))
    unflattening.follow(body)
    return unflattening


def row() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    cu = torch.from_numpy(offsets(LENGTHS))
    return {
        "input_ids": torch.randint(0, 11, (1, sum(LENGTHS)), generator=generator),
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "cu_seq_lens_q": cu,
    }


def alone(body: Body) -> Tensor:
    batch = row()
    spans = itertools.pairwise(batch["cu_seq_lens_q"].tolist())
    return torch.cat([body(batch["input_ids"][:, a:b]) for a, b in spans], 1)


def test_the_modules_that_mix_tokens_are_found_whole() -> None:
    body = Body().double()
    short, long = calls_of(body, 9), calls_of(body, 13)
    with torch.no_grad():
        assert list(find_mixers(body, short, long, (9, 13), set())) == ["layers.0.mixer", "layers.1.mixer"]


def test_a_packed_row_equals_its_documents_alone_in_values_and_gradients() -> None:
    torch.manual_seed(0)
    body = Body().double()
    expected = alone(body)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), list(body.parameters()))
    wrapped(body)
    packed = body(**row())
    torch.testing.assert_close(packed, expected, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad((packed * weights).sum(), list(body.parameters()))
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    assert (body(**(row() | {"cu_seq_lens_q": torch.tensor([0, 15])})) - expected).abs().max() > 1e-2


def test_without_boundaries_a_wrapped_module_runs_as_it_is() -> None:
    body = Body().double()
    before = body(row()["input_ids"])
    unflattening = wrapped(body)
    body(**row()).sum().backward()
    assert torch.equal(body(row()["input_ids"]), before)
    assert unflattening.rectangles is None
    unflattening.undo()
    assert "forward" not in body.layers[0].mixer.__dict__


def test_backward_recomputes_under_the_boundaries_of_its_own_forward() -> None:
    torch.manual_seed(0)
    body = Body().double()
    wrapped(body)
    expected = torch.autograd.grad(body(**row()).square().sum(), body.words.weight)[0]
    plain = body.layers[0].forward
    body.layers[0].forward = lambda *args, **kwargs: torch.utils.checkpoint.checkpoint(  # type: ignore[method-assign]
        plain, *args, use_reentrant=False, **kwargs
    )
    loss = body(**row()).square().sum()
    body(**(row() | {"cu_seq_lens_q": torch.tensor([0, 5, 15])}))  # another row in between
    torch.testing.assert_close(torch.autograd.grad(loss, body.words.weight)[0], expected, rtol=1e-12, atol=1e-12)


class Honours(Recurrence):
    """Takes the boundaries itself."""

    def forward(self, hidden: Tensor, scale: Tensor | None = None, **kwargs: Any) -> Tensor:
        if kwargs.get("cu_seq_lens_q") is None:
            return super().forward(hidden, scale)
        spans = list(itertools.pairwise(kwargs["cu_seq_lens_q"].tolist()))
        return torch.cat(
            [super(Honours, self).forward(hidden[:, a:b], None if scale is None else scale[:, a:b]) for a, b in spans],
            1,
        )


@pytest.mark.parametrize(("mixer", "leaking"), [(Recurrence, True), (Honours, False)])
def test_a_mixer_that_is_handed_boundaries_is_found_out_if_it_ignores_them(
    mixer: type[nn.Module], leaking: bool
) -> None:
    body = Body(mixer).double()
    short, long = calls_of(body, 9), calls_of(body, 13)
    packed = calls_of(body, 9, cu_seq_lens_q=torch.tensor([0, 4, 9]))
    module = body.layers[1].mixer
    with torch.no_grad():
        assert leaks(module, packed[module], short[module], long[module], (9, 13), 4) is leaking


class Scores(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return mask @ hidden


def test_a_module_that_gets_tokens_by_tokens_is_not_wrapped() -> None:
    short = Call({"hidden": torch.zeros(1, 9, 2), "mask": torch.zeros(1, 9, 9)}, torch.zeros(1, 9, 2))
    long = Call({"hidden": torch.zeros(1, 13, 2), "mask": torch.zeros(1, 13, 13)}, torch.zeros(1, 13, 2))
    with pytest.raises(ModelError, match=r"scores \(Scores\): receives mask, tokens by tokens"):
        Unflattening().wrap(Scores(), "scores", short, long, (9, 13))
