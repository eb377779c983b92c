"""Attention over packed rows as shapes alone: what every variable-length kernel demands, and what it returns."""

import torch
from torch import Tensor


@torch.library.custom_op("rehearsal::varlen", mutates_args=())
def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """There is no kernel: only fake tensors come here."""
    raise NotImplementedError("rehearsal::varlen runs on fake tensors only")


@varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    assert q.dim() == k.dim() == v.dim() == 3
    for heads in (q, k, v):
        assert heads.device.type == "cuda"
        assert heads.dtype in (torch.bfloat16, torch.float16), f"{heads.dtype} heads; the kernels take bf16 and fp16"
        assert heads.dtype == q.dtype
        assert heads.stride(-1) == 1, "the last dimension of a head must be contiguous"
        assert heads.shape[-1] % 8 == 0
        assert heads.shape[-1] <= 256
    assert q.shape[1] % k.shape[1] == 0
    assert k.shape[1] == v.shape[1]
    assert q.shape[0] == k.shape[0] == v.shape[0]
    assert q.shape[2] == k.shape[2]
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.device.type == "cuda"
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx, grad: Tensor):
    heads = ctx.saved_tensors
    assert grad.dtype == heads[0].dtype
    return (*(torch.empty_like(x) for x in heads), None, None)


varlen.register_autograd(_backward, setup_context=_setup)


def call(q, k, v, cu_q, cu_k, longest_q, longest_k) -> Tensor:
    """Check what the kernels check about both sides, then return the shape."""
    assert cu_q is cu_k
    assert type(longest_q) is int
    assert longest_q == longest_k
    return varlen(q, k, v, cu_q, longest_q)
