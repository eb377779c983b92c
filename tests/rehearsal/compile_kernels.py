"""flash-attn-4 compiled for Hopper without one: python compile_kernels.py < cases.json.

The product's own call is made with fake CUDA tensors; the package then compiles the kernels of forward and backward,
and launches nothing. What a kernel does not support, or a wrong argument, fails here as it would on the GPU. Takes
{name: {"widths": [D, D_v], "heads": [H, H_kv], "window", "softcap", "sinks"}}, prints {name: null or what failed}.
"""

import json
import sys

import torch
from rehearse import DEVICE, pretend
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS = 304


def compile_case(width, value_width, heads, kv_heads, window=None, softcap=None, sinks=False) -> None:
    """Call the backend forward and backward."""
    from trainer.model.backends.registry import ATTENTION_BACKENDS

    def heads_of(count: int, width: int) -> torch.Tensor:
        return torch.empty(TOKENS, count, width, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)

    with FakeTensorMode():
        q, k, v = heads_of(heads, width), heads_of(kv_heads, width), heads_of(kv_heads, value_width)
        cu = torch.empty(7, dtype=torch.int32, device=DEVICE)
        sink = torch.empty(heads, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) if sinks else None
        out = ATTENTION_BACKENDS["flash-attn-4"](q, k, v, cu, 200, window, width**-0.5, softcap, sink)
        assert out.shape == (TOKENS, heads, value_width)
        out.sum().backward()
        for tensor in (q, k, v, *([sink] if sinks else [])):
            assert tensor.grad is not None, "a tensor that learns got no gradient"
            assert tensor.grad.shape == tensor.shape


def attempt(case: dict) -> str | None:
    """Return what failed, None if nothing did."""
    (width, value_width), (heads, kv_heads) = case["widths"], case.get("heads", [4, 2])
    try:
        compile_case(
            width, value_width, heads, kv_heads, case.get("window"), case.get("softcap"), case.get("sinks", False)
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


if __name__ == "__main__":
    pretend()
    print(json.dumps({name: attempt(case) for name, case in json.load(sys.stdin).items()}))
