"""liger's kernels in Triton's interpreter, on a CPU: python interpret.py, with TRITON_INTERPRET=1.

Prints {kernel: largest difference of results and gradients from plain torch}. The interpreter has no libdevice, so the
functions that kernels take from it are written with the interpreter's own; scalars get the method that kernels call.
"""

import json

import torch
import torch.nn.functional as F
import triton.language as tl
import triton.runtime.interpreter as interpreter
from liger_kernel.ops import geglu, rms_norm
from liger_kernel.transformers import functional as liger

LABELS = torch.tensor([1, -100, 3, 0, 8])


class Scalar(float):
    """A number that kernels may convert, as they do with compiled constants."""

    def to(self, dtype):
        return self


def stand_in() -> None:
    """Give the interpreter what it lacks."""
    call = interpreter.GridExecutor.__call__

    def convertible(value):
        return Scalar(value) if type(value) is float else value

    def run(self, *args, **kwargs):
        return call(self, *map(convertible, args), **{name: convertible(value) for name, value in kwargs.items()})

    interpreter.GridExecutor.__call__ = run
    rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def difference(kernel, plain, *shapes) -> float:
    """Return the largest difference between two functions of random tensors, forward and backward."""
    torch.manual_seed(0)
    left = [torch.randn(shape, requires_grad=True) for shape in shapes]
    right = [x.detach().clone().requires_grad_() for x in left]
    results = [out if isinstance(out, tuple) else (out,) for out in (kernel(*left), plain(*right))]
    upstream = [torch.randn_like(x) for x in results[1]]
    grads = [  # some kernels write their gradient over the one that comes in
        torch.autograd.grad(out, x, [grad.clone() for grad in upstream])
        for out, x in zip(results, (left, right), strict=True)
    ]
    pairs = zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotary(q, k, apply):
    positions = torch.arange(5)[:, None] * torch.arange(1, 9)[None].repeat(1, 2) / 10
    return apply(q, k, positions.cos()[None], positions.sin()[None])


def loss(hidden, weight):
    return liger.liger_fused_linear_cross_entropy(
        hidden, weight, LABELS, lse_square_scale=1e-3, reduction="sum", accum_dtype=torch.float32
    )


def plain_loss(hidden, weight):
    logits = hidden @ weight.t()
    z = (torch.logsumexp(logits, 1).square() * (LABELS != -100)).sum()
    return F.cross_entropy(logits, LABELS, reduction="sum") + 1e-3 * z


if __name__ == "__main__":
    stand_in()
    norm = (lambda x, w: liger.liger_rms_norm(x, w, 1e-6)), lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6)
    turn = (
        lambda q, k: rotary(q, k, lambda q, k, cos, sin: liger.liger_rope(q, k, cos, sin)),
        lambda q, k: rotary(q, k, lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))),
    )
    kernels = {
        "rms_norm": (*norm, (5, 32), (32,)),
        "swiglu": (liger.liger_swiglu, lambda a, b: F.silu(a) * b, (5, 32), (5, 32)),
        "geglu": (liger.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, (5, 32), (5, 32)),
        "rope": (*turn, (1, 4, 5, 16), (1, 2, 5, 16)),
        "fused loss": (loss, plain_loss, (5, 16), (11, 16)),
    }
    print(json.dumps({name: difference(*how) for name, how in kernels.items()}))
