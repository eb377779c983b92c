"""Compiled layers over torch's variable-length operator, on a CPU: its kernels are replaced by plain attention."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.loop import LogInterval, take_step
from trainer.run import set_up

CPU = torch.device("cpu")


def attend(query, key, value, cu, scale) -> Tensor:
    parts = [
        F.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1) for x in (query, key, value)), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(0, 1)
        for a, b in pairwise(cu.tolist())
        if b > a
    ]
    return torch.cat(parts).contiguous()


def forward(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, *rest):
    out = attend(query, key, value, cu_seq_q, scale)
    return out, query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32), query.new_empty(2).long()


def backward(
    grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state, scale=None, *rest
):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        again = attend(*leaves, cu_seq_q, scale)
    return torch.autograd.grad(again, leaves, grad_out)


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


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # of answers that never change
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
def test_layers_compile_whole_and_rarely(packs_on_disk, small_model, tmp_path, monkeypatch, varlen_on_cpu):
    compiler = CompileCounterWithBackend("eager")
    compile_whole = partial(nn.Module.compile, backend=compiler, fullgraph=True)  # a graph break raises
    monkeypatch.setattr(nn.Module, "compile", lambda layer: compile_whole(layer))
    compiled = losses_of(run_of(packs_on_disk, small_model(), tmp_path / "compiled", "torch"))
    plain = losses_of(run_of(packs_on_disk, small_model(), tmp_path / "plain", "cpu"))
    assert compiled == pytest.approx(plain, rel=1e-5)  # the same losses as the loop over segments
    assert 1 <= compiler.frame_count <= 2  # one kind of layer: fixed shapes, then at most once more
