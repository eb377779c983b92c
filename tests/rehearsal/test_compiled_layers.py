"""Compiled layers over torch's variable-length operator, on a CPU: its kernels are replaced by plain attention."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.loop import LogInterval, take_step
from trainer.run import set_up

CPU = torch.device("cpu")


def segments_of(cu: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(cu.tolist()) if b > a]


def probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the causal attention of one segment, (heads, queries, keys)."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def forward(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, *rest):
    """Attend by the definition; an operator's kernel runs below autograd, so its backward is written out too."""
    groups, out = query.shape[1] // key.shape[1], torch.empty_like(query)
    for part in segments_of(cu_seq_q):
        k, v = (x[part].repeat_interleave(groups, 1) for x in (key, value))
        out[part] = torch.einsum("hqk,khd->qhd", probabilities(query[part], k, scale), v)
    return out, query.new_zeros(query.shape[1], query.shape[0]), query.new_zeros(2).long()


def backward(
    grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state, scale=None, *rest
):
    groups = query.shape[1] // key.shape[1]
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for part in segments_of(cu_seq_q):
        q, upstream = query[part], grad_out[part]
        k, v = (x[part].repeat_interleave(groups, 1) for x in (key, value))
        p = probabilities(q, k, scale)
        by_p = torch.einsum("qhd,khd->hqk", upstream, v)
        by_score = p * (by_p - (by_p * p).sum(-1, keepdim=True)) * scale
        grads[0][part] = torch.einsum("hqk,khd->qhd", by_score, k)
        for grad, whole in (
            (1, torch.einsum("hqk,qhd->khd", by_score, q)),
            (2, torch.einsum("hqk,qhd->khd", p, upstream)),
        ):
            grads[grad][part] = whole.unflatten(1, (-1, groups)).sum(2)
    return tuple(grads)


@pytest.fixture
def varlen_on_cpu() -> Iterator[None]:
    """Give the operator of torch a CPU kernel while a test runs."""
    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", forward, "CPU")
    library.impl("_varlen_attn_backward", backward, "CPU")
    yield
    library._destroy()


def run_of(dataset, model, out, backend):
    """Set up a run on the CPU; its attention may be a backend that belongs to a GPU."""
    config = TrainConfig(
        dataset=str(dataset), model=model, out=str(out), steps=9, dtype="fp32", device="cpu",
        compile=backend == "torch", seed=1,
    )  # fmt: skip
    run = set_up(config, World(device=CPU))
    run.lm.backend = backend
    return run


def losses_of(run) -> list[float]:
    losses = []
    with closing(run.metrics), closing(run.loader.forever()) as batches:
        for _ in range(8):
            interval = LogInterval(torch.zeros(()))
            take_step(run, batches, interval)
            losses.append(float(interval.loss))
            run.step += 1
    return losses


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
def test_layers_compile_whole_and_rarely(packs_on_disk, small_model, tmp_path, monkeypatch, varlen_on_cpu):
    compiler = CompileCounterWithBackend("eager")
    compile_whole = partial(nn.Module.compile, backend=compiler, fullgraph=True)  # a graph break raises
    monkeypatch.setattr(nn.Module, "compile", lambda layer: compile_whole(layer))
    compiled = losses_of(run_of(packs_on_disk, small_model(), tmp_path / "compiled", "torch"))
    plain = losses_of(run_of(packs_on_disk, small_model(), tmp_path / "plain", "cpu"))
    assert compiled == pytest.approx(plain, rel=1e-5)  # the same losses as the loop over segments
    # one kind of layer: all sizes fixed, then the number of segments and the longest one become free
    assert 1 <= compiler.frame_count <= 3
