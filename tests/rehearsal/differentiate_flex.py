"""FlexAttention forward and backward on fake CUDA tensors: python differentiate_flex.py < cases.json.

FlexAttention has no backward on a CPU. Here its operator is traced with shapes alone, on tensors of device "cuda": a
mask on another device, a width or dtype that it does not take, or a gradient that is missing fails. Takes
{name: {"width", "window", "softcap", "sinks"}}, prints {name: null or what failed}.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from rehearse import DEVICE, pretend
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS = 304
BOUNDARIES = np.array([0, 0, 1, 34, 234, 234, 304], np.int32)


def differentiate(mode, width, window=None, softcap=None, sinks=False) -> None:
    """Call the backend forward and backward."""
    from trainer.model.backends.registry import ATTENTION_BACKENDS

    with mode:
        q, k, v = (
            torch.empty(TOKENS, heads, width, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
            for heads in (4, 2, 2)
        )
        cu = torch.empty(len(BOUNDARIES), dtype=torch.int32, device=DEVICE)
        sink = torch.empty(4, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) if sinks else None
        out = ATTENTION_BACKENDS["flex"](q, k, v, cu, 200, window, width**-0.5, softcap, sink)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        out.sum().backward()
        for tensor in (q, k, v, *([sink] if sinks else [])):
            assert tensor.grad is not None, "a tensor that learns got no gradient"
            assert (tensor.grad.shape, tensor.grad.dtype, tensor.grad.device) == (tensor.shape, tensor.dtype, DEVICE)


def attempt(mode, case: dict) -> str | None:
    """Return what failed, None if nothing did."""
    try:
        differentiate(mode, **case)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


if __name__ == "__main__":
    from torch.nn.attention.flex_attention import flex_attention

    from trainer.model.backends import flex

    pretend()
    torch.cuda._lazy_init = lambda: None
    torch.cuda.get_rng_state = lambda *_, **__: None
    torch.cuda.set_rng_state = lambda *_, **__: None
    torch._C._accelerator_getDeviceIndex = lambda: 0
    mode, from_numpy = FakeTensorMode(allow_non_fake_inputs=True), torch.from_numpy
    torch.from_numpy = lambda array: mode.from_tensor(from_numpy(array))
    torch.Tensor.cpu = lambda tensor: SimpleNamespace(numpy=lambda: BOUNDARIES)  # the one read, of boundaries
    flex._compiled = lambda: flex_attention  # no compiler: its kernels want a GPU
    print(json.dumps({name: attempt(mode, case) for name, case in json.load(sys.stdin).items()}))
