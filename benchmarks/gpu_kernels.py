"""What the GPU suite asks of kernels: what is installed, whether backends equal plain attention, how long they take."""

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.model.backends.foreign import describe_failure, failure_of
from trainer.model.backends.interface import Needs
from trainer.model.backends.registry import ATTENTION_BACKENDS
from trainer.model.backends.timing import device_seconds

TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}  # largest difference over largest value
HEADS = (64, 128, 256, 512)
PACKAGES = {  # distribution: the module that must import
    "torch": "torch", "triton": "triton", "flash-attn-4": "flash_attn.cute", "flash-attn-3": "flash_attn_interface",
    "flash-attn": "flash_attn", "liger-kernel": "liger_kernel", "transformers": "transformers",
}  # fmt: skip
Table = tuple[str, list[str], list[list[str]]]
Part = Callable[["Suite"], Iterator[Table]]


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class Suite:
    """What all parts share."""

    device: torch.device
    tiny: bool
    folder: Path
    figures: dict[str, Any]
    "What becomes the JSON."
    save: Callable[[], None] = lambda: None
    "Writes the figures as they are; called after every row, so that a kill costs one."
    deadline: float = float("inf")
    "When the part that runs has used its time, by `time.perf_counter`."
    stopped: bool = False
    "Whether it left something out for that."

    @property
    def dtype(self) -> torch.dtype:
        """Type in which attention computes."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def is_over(self) -> bool:
        """Whether the part has used its time, and leaves the rest out."""
        self.stopped |= time.perf_counter() > self.deadline
        return self.stopped

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Keep a row of figures, print it, write it."""
        self.figures[part].append(row)
        tell(f"{part}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
        self.save()

    def not_run(self, backend: str, head_dim: int) -> str | None:
        """Return why a backend does not run here, None if it does; plain torch only where there is nothing else."""
        if backend == "cpu" and self.device.type != "cpu":
            return "the segment loop is for machines without kernels"
        needs = Needs(device=self.device, dtype=self.dtype, head_dim=head_dim, value_dim=head_dim)
        return ATTENTION_BACKENDS[backend].unsupported_reason(needs)

    def backends(self, head_dim: int) -> list[str]:
        """Return the attention backends that run here."""
        return [name for name in ATTENTION_BACKENDS if self.not_run(name, head_dim) is None]


def environment(suite: Suite) -> Iterator[Table]:
    """Say what is installed, whether it imports, and which backends serve heads of which width."""
    rows = []
    for package, module in PACKAGES.items():
        error = failure_of(lambda module=module: importlib.import_module(module))
        rows.append([package, _version(package), "imports" if error is None else describe_failure(error)])
    if suite.device.type == "cuda":
        device = torch.cuda.get_device_properties(suite.device)
        rows.append(
            ["GPU", device.name, f"{device.total_memory / 2**30:.0f} GiB, capability {device.major}.{device.minor}"]
        )
    for name in ATTENTION_BACKENDS:
        reasons = {width: suite.not_run(name, width) for width in HEADS}
        widths = ", ".join(str(width) for width, reason in reasons.items() if reason is None)
        said = f"heads of {widths}" if widths else str(reasons[HEADS[0]])
        rows.append([f"attention {name}", "", said])
    suite.figures["environment"] = rows
    yield "Environment", ["what", "version", "state"], rows


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def heads(suite: Suite, tokens: int, num_heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """Return random q, k, v and an upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, n, head_dim) for n in (num_heads, kv_heads, kv_heads, num_heads)]
    return [torch.randn(shape, generator=generator).to(suite.device, suite.dtype) for shape in shapes]


def offsets(lengths: np.ndarray, device: torch.device) -> Tensor:
    """Return cu_seqlens."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: int | None, scale: float) -> Tensor:
    """Compute attention in fp32 by its definition: all scores, a mask, a softmax."""
    place = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(cu[1:], place, right=True)
    behind = place[:, None] - place
    mask = (document[:, None] == document) & (behind >= 0) & (behind < (window or len(q)))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def equality(suite: Suite) -> Iterator[Table]:
    """Check every backend against the definition, forward and backward; one that cannot run is a row too."""
    lengths = np.array([0, 1, 33, 0, 7, 64, 20] if suite.tiny else [0, 1, 700, 33, 0, 7, 1024, 64, 129, 90])
    suite.figures["equality"] = []
    for head_dim in (16,) if suite.tiny else HEADS:
        inputs, cu = heads(suite, int(lengths.sum()), 4, 2, head_dim), offsets(lengths, suite.device)
        for name in ATTENTION_BACKENDS:
            if (reason := suite.not_run(name, head_dim)) is not None:
                suite.add("equality", {"backend": name, "head_dim": head_dim, "not_run": reason})
        for window in (None, 16):
            wanted = _wanted(inputs, cu, window)
            for name in suite.backends(head_dim):
                if suite.is_over():
                    break
                row = {"backend": name, "head_dim": head_dim, "window": window}
                suite.add("equality", row | _off(suite, name, inputs, cu, int(lengths.max()), window, wanted))
    columns = ["backend", "head_dim", "window", "output", "dq", "dk", "dv", "equal"]
    yield (
        "Backends against plain fp32 attention: largest difference over largest value", columns,
        [
            [
                row["backend"], str(row["head_dim"]), str(row.get("window") or "–"),
                *([f"{each:.1e}" for each in row.get("off", [])] or ["", "", "", ""]),
                "yes" if row.get("equal") else row.get("not_run", row.get("failed", "NO")),
            ]
            for row in suite.figures["equality"]
        ],
    )  # fmt: skip


def _wanted(inputs: list[Tensor], cu: Tensor, window: int | None) -> list[Tensor]:
    """Return what plain attention in fp32 gives: output, dq, dk, dv."""
    *tensors, upstream = inputs
    exact = [x.detach().float().requires_grad_() for x in tensors]
    out = plain_attention(*exact, cu, window, exact[0].shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, exact, upstream.float())]


def _off(
    suite: Suite, name: str, inputs: list[Tensor], cu: Tensor, longest: int, window: int | None, wanted: list[Tensor]
) -> dict[str, Any]:
    """Return how far a backend is off, and whether that is rounding; what it raises is its result."""
    *tensors, upstream = inputs
    found: list[Tensor] = []

    def run() -> None:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = ATTENTION_BACKENDS[name](*leaves, cu, longest, window, leaves[0].shape[-1] ** -0.5)
        found.extend([out.detach(), *torch.autograd.grad(out, leaves, upstream)])

    if (error := failure_of(run)) is not None:
        return {"equal": False, "failed": describe_failure(error)}
    pairs = zip(found, wanted, strict=True)
    off = [float((ours.float() - it).abs().max() / it.abs().max()) for ours, it in pairs]
    return {"off": off, "equal": all(each <= TOLERANCE[suite.dtype] for each in off)}


def lengths_like(name: str, tokens: int) -> np.ndarray:
    """Return document lengths that add up to exactly `tokens`."""
    if name.isdigit():
        return np.full(tokens // int(name), int(name))
    drawn = np.random.default_rng(0).lognormal(np.log(300), 1.0, tokens).clip(1, 8192).astype(np.int64)
    kept = drawn[: int(np.searchsorted(drawn.cumsum(), tokens))]
    rest = tokens - int(kept.sum())
    return np.append(kept, rest) if rest else kept


def kernels(suite: Suite) -> Iterator[Table]:
    """Time forward, and forward with backward, over distributions of document lengths."""
    tokens, num_heads, kv_heads = (256, 4, 2) if suite.tiny else (16384, 32, 8)
    suite.figures["kernels"] = []
    for head_dim in (16,) if suite.tiny else (64, 128):
        q, k, v, upstream = heads(suite, tokens, num_heads, kv_heads, head_dim)
        for name in ("32", "128", "lognormal") if suite.tiny else ("32", "128", "512", "2048", "8192", "lognormal"):
            lengths = lengths_like(name, tokens)
            cu, longest = offsets(lengths, suite.device), int(lengths.max())
            flops = (
                2 * head_dim * num_heads * float((lengths * (lengths + 1)).sum())
            )  # forward; backward is 2.5 times that
            for backend in suite.backends(head_dim):
                if suite.is_over():
                    break
                attend = ATTENTION_BACKENDS[backend]
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]

                def forward(attend: Any = attend, leaves: Any = leaves, cu: Any = cu, longest: int = longest) -> Tensor:
                    out: Tensor = attend(*leaves, cu, longest, None, leaves[0].shape[-1] ** -0.5)
                    return out

                def both(forward: Any = forward, leaves: Any = leaves, upstream: Any = upstream) -> object:
                    return torch.autograd.grad(forward(), leaves, upstream)

                found: list[float] = []

                def time_them(forward: Any = forward, both: Any = both, found: list[float] = found) -> None:
                    found.extend(device_seconds(suite.device, work) for work in (forward, both))

                if (error := failure_of(time_them)) is not None:
                    suite.figures["left_out"].append(f"{backend}, documents of {name}: {describe_failure(error)}")
                    continue
                there, back = found
                suite.add(
                    "kernels",
                    {
                        "documents": name, "head_dim": head_dim, "backend": backend, "forward_ms": there * 1e3,
                        "both_ms": back * 1e3, "forward_tflops": flops / there / 1e12,
                        "both_tflops": 3.5 * flops / back / 1e12,
                    },
                )  # fmt: skip
    columns = ["documents of", "head_dim", "backend", "forward ms", "TFLOP/s", "with backward ms", "TFLOP/s"]
    keys = ("forward_ms", "forward_tflops", "both_ms", "both_tflops")
    yield (
        f"Kernels over {tokens} tokens, {num_heads} heads, {kv_heads} of keys; FLOPs of causal pairs alone", columns,
        [
            [row["documents"], str(row["head_dim"]), row["backend"], *[f"{row[key]:.3g}" for key in keys]]
            for row in suite.figures["kernels"]
        ],
    )  # fmt: skip
