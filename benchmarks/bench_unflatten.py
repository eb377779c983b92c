"""What do rectangles of segments cost a mixer, beside as many real tokens in rows of equal length?

    python benchmarks/bench_unflatten.py

Forward and backward of one mixer, chat-like lengths (lognormal, median 300, sigma 1, fixed seed). Both sides run in
turn in one process; the median of 5 and the range of their ratio are printed. Planning is timed apart: the loader's
thread does it ahead of the step.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from trainer.model.rectangles import plan_rectangles
from trainer.model.unflatten import Role, collect, spread

WIDTH = 256
ROLE = Role(1, 0)


def mixers() -> dict[str, torch.nn.Module]:
    """Return the mixers that are timed, of small widths."""
    torch.manual_seed(0)
    mamba = Mamba2Config(hidden_size=WIDTH, num_heads=8, head_dim=64, state_size=32, n_groups=1, chunk_size=64)
    delta = Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32,
    )  # fmt: skip
    return {"Mamba-2": Mamba2Mixer(mamba, layer_idx=0), "gated delta rule": Qwen3NextGatedDeltaNet(delta, 0)}


def lengths_of(tokens: int, seed: int) -> np.ndarray:
    """Return segment lengths that sum to `tokens`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(300), 1.0, tokens).astype(np.int64).clip(2, tokens // 2)
    lengths = drawn[: np.searchsorted(np.cumsum(drawn), tokens) + 1]
    lengths[-1] -= lengths.sum() - tokens
    return lengths[lengths > 0]


def seconds(work: Callable[[], torch.Tensor]) -> float:
    """Time forward and backward."""
    begin = time.perf_counter()
    work().sum().backward()
    return time.perf_counter() - begin


def main() -> None:
    """Print the ratio for each mixer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="once, on few tokens: to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.repeats = 1024, 1
    lengths = lengths_of(options.tokens, seed=0)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    begin = time.perf_counter()
    rectangles = plan_rectangles(cu_seqlens)
    planned = time.perf_counter() - begin
    rows = len(lengths)
    width = options.tokens // rows
    print(
        f"{options.tokens} tokens in {rows} segments, {len(rectangles.shapes)} rectangles, "
        f"{len(rectangles.tokens) / options.tokens - 1:.1%} padding, planned in {planned * 1e3:.1f} ms"
    )
    row = torch.randn(1, options.tokens, WIDTH, requires_grad=True)
    equal = torch.randn(rows, width, WIDTH, requires_grad=True)
    for name, mixer in mixers().items():

        def on_rectangles(mixer: torch.nn.Module = mixer) -> torch.Tensor:
            return collect([mixer(part) for part in spread(row, ROLE, rectangles)], ROLE, rectangles)

        def on_equal_rows(mixer: torch.nn.Module = mixer) -> torch.Tensor:
            return mixer(equal)

        seconds(on_rectangles), seconds(on_equal_rows)
        scale = options.tokens / equal.shape[:2].numel()
        ratios = [seconds(on_rectangles) / (seconds(on_equal_rows) * scale) for _ in range(options.repeats)]
        print(f"{name}: {np.median(ratios):.2f} times rows of {width} (from {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
