"""Every attention backend against causal attention inside segments, written out from its definition."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.backends.interface import Backend, Needs
from trainer.model.backends.registry import ATTENTION_BACKENDS

ON_CPU = sorted(
    name
    for name, backend in ATTENTION_BACKENDS.items()
    if backend.unsupported_reason(Needs(device=torch.device("cpu"), dtype=torch.float64, head_dim=8, value_dim=8))
    is None
)


def allowed_pairs(lengths: list[int], window: int | None) -> torch.Tensor:
    """Return which query (row) may see which key (column), bool (T, T)."""
    document = [i for i, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(
        [
            [
                document[query] == document[key] and 0 <= query - key < (window or len(document))
                for key in range(len(document))
            ]
            for query in range(len(document))
        ]
    )


def by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax over the allowed keys, and the sink where there is one, query head by query head."""
    allowed, group = allowed_pairs(lengths, window), q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        exponentials = scores.masked_fill(~allowed, float("-inf")).exp()
        total = exponentials.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        heads.append(exponentials / total @ v[:, head // group])
    return torch.stack(heads, dim=1)


def offsets(lengths: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def run(
    backend: Backend, heads: list[torch.Tensor], lengths: list[int], window: int | None, scale: float
) -> list[torch.Tensor]:
    """Return the output and the gradients of all heads under one fixed upstream gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in heads]
    out = backend(*leaves, offsets(lengths, str(heads[0].device)), max(lengths), window, scale)
    upstream = torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def heads_of(lengths: list[int], heads: int, group: int, dim: int, value_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    shapes = [(heads * group, dim), (heads, dim), (heads, value_dim)]
    return [torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("name", ON_CPU)
@given(
    lengths=st.lists(st.integers(0, 24), min_size=1, max_size=6).filter(any),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dim=st.sampled_from([4, 6]),
    value_dim=st.sampled_from([4, 10]),
    window=st.one_of(st.none(), st.integers(1, 30)),
)
@settings(max_examples=40, deadline=None)
def test_a_query_sees_the_keys_of_its_own_segment_at_or_before_it(
    name: str, lengths: list[int], heads: int, group: int, dim: int, value_dim: int, window: int | None
) -> None:
    tensors = heads_of(lengths, heads, group, dim, value_dim)
    ours = run(ATTENTION_BACKENDS[name], tensors, lengths, window, 0.3)
    reference = Backend(
        lambda q, k, v, cu, longest, window, scale, *rest: by_definition(q, k, v, lengths, window, scale),
        lambda needs: None,
    )
    expected = run(reference, tensors, lengths, window, 0.3)
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(1.5, False), (None, True), (0.7, True)])
@pytest.mark.parametrize("window", [None, 3, 400])
def test_soft_caps_and_sinks_are_exact(name: str, softcap: float | None, with_sinks: bool, window: int | None) -> None:
    lengths = [7, 1, 0, 300, 24]  # one longer than a block of queries
    tensors = [*heads_of(lengths, 2, 2, 6, 10), torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)]
    upstream = torch.cos(torch.arange(sum(lengths) * 4 * 10)).view(-1, 4, 10).double()

    def gradients(attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (tensors if with_sinks else tensors[:3])]
        out = attend(*leaves[:3], leaves[3] if with_sinks else None)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    backend = ATTENTION_BACKENDS[name]
    ours = gradients(lambda q, k, v, s: backend(q, k, v, offsets(lengths), 300, window, 0.3, softcap, s))
    expected = gradients(lambda q, k, v, s: by_definition(q, k, v, lengths, window, 0.3, softcap, s))
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ON_CPU)
def test_windows_longer_than_a_block_are_exact(name: str) -> None:
    lengths, window = [700, 1, 300], 270  # blocks of 270 queries; the last one is shorter
    tensors = heads_of(lengths, 1, 2, 4, 4)
    ours = ATTENTION_BACKENDS[name](*tensors, offsets(lengths), 700, window, 0.5)
    torch.testing.assert_close(ours, by_definition(*tensors, lengths, window, 0.5), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize(("window", "pairs"), [(None, 6 + 3 + 10), (2, 5 + 3 + 7)])
def test_documents_of_3_2_and_4_tokens_have_as_many_pairs_as_counted_by_hand(
    name: str, window: int | None, pairs: int
) -> None:
    # Equal scores and one-hot values: row i of the output is query i's attention over all keys.
    zeros, one_hot = torch.zeros(9, 1, 4), torch.eye(9).unsqueeze(1)
    weights = ATTENTION_BACKENDS[name](zeros, zeros, one_hot, offsets([3, 2, 4]), 4, window, 1.0).squeeze(1)
    assert int((weights > 0).sum()) == pairs
    assert torch.equal(weights > 0, allowed_pairs([3, 2, 4], window))


@pytest.mark.parametrize("name", ON_CPU)
def test_a_batch_that_is_one_long_document_is_plain_causal_attention(name: str) -> None:
    tensors = heads_of([200], 2, 2, 8, 8)
    q, k, v = (x.transpose(0, 1) for x in tensors)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)
    ours = ATTENTION_BACKENDS[name](*tensors, offsets([200]), 200, None, 8**-0.5)
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(ATTENTION_BACKENDS))
@pytest.mark.parametrize("window", [None, 1, 16, 500], ids=lambda window: f"window {window}")
@pytest.mark.parametrize(("group", "dim", "value_dim"), [(1, 64, 64), (4, 128, 128), (2, 96, 64), (2, 256, 256)])
def test_on_a_gpu_every_backend_gives_the_numbers_of_the_definition(
    name: str, window: int | None, group: int, dim: int, value_dim: int
) -> None:
    device = torch.device("cuda")
    needs = Needs(device=device, dtype=torch.bfloat16, head_dim=dim, value_dim=value_dim)
    if reason := ATTENTION_BACKENDS[name].unsupported_reason(needs):
        pytest.skip(reason)
    lengths = [1, 130, 0, 517, 16, 3, 64, 0]
    tensors = [x.to(device, torch.bfloat16) for x in heads_of(lengths, 2, group, dim, value_dim)]
    ours = run(ATTENTION_BACKENDS[name], tensors, lengths, window, dim**-0.5)
    expected = run(ATTENTION_BACKENDS["cpu"], [x.double().cpu() for x in tensors], lengths, window, dim**-0.5)
    for left, right in zip(ours, expected, strict=True):
        error = (left.double().cpu() - right).abs().max() / right.abs().max()
        assert error.item() < 1e-2
