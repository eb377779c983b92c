"""What does it take to draw packs anew, and how many of them are others?

    python benchmarks/bench_redraw.py [DATASET ...]

Ten million lengths (lognormal, median 330, sigma 1, packs of 8,192) are packed once and drawn three times. Of each
dataset: how many packs of several segments come again in the next pass, and how fast packs are read, drawn anew and as
they are stored, in turn in one process.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from pipeline.packing.packers import PACKERS, Drawing
from shards import Dataset
from shards.reader import Pack
from trainer.feeding.redraw import RedrawnPacks

SEQ_LEN = 8192


def draw_many(number: int) -> None:
    """Time drawing from a synthetic list of lengths."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 1.0, number), 1, SEQ_LEN).astype(np.int32)
    make_tree = PACKERS["auto"].make_tree
    assert make_tree is not None
    Drawing(lengths[:1000], SEQ_LEN, make_tree).bins(0)  # compiles
    begin = time.perf_counter()
    drawing = Drawing(lengths, SEQ_LEN, make_tree)
    packed = time.perf_counter() - begin
    times = []
    for seed in range(3):
        begin = time.perf_counter()
        drawing.bins(seed)
        times.append(time.perf_counter() - begin)
    print(
        f"{number:,} segments, {drawing.num_bins:,} packs: packed once in {packed:.2f} s, each pass drawn in "
        f"{min(times):.2f} to {max(times):.2f} s"
    )


def together(drawn: RedrawnPacks, number: int) -> set[frozenset[int]]:
    """Return which segments share a pack in a pass."""
    held = (drawn.segments(number * len(drawn) + pack) for pack in range(len(drawn)))
    return {frozenset(segments.tolist()) for segments in held if len(segments) > 1}


def rate(read: Callable[[int], Pack], packs: int) -> float:
    """Return million tokens a second of reading packs into memory."""
    begin, tokens = time.perf_counter(), 0
    for pack in range(packs):
        tokens += len(read(pack).input_ids.copy())
    return tokens / (time.perf_counter() - begin) / 1e6


def main() -> None:
    """Print one line for the synthetic lengths, and one for each dataset."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("datasets", nargs="*")
    parser.add_argument("--segments", type=int, default=10_000_000)
    parser.add_argument("--quick", action="store_true", help="few segments: to see that it works")
    options = parser.parse_args()
    draw_many(100_000 if options.quick else options.segments)
    for path in options.datasets:
        dataset = Dataset(path)
        begin = time.perf_counter()
        drawn = RedrawnPacks(dataset, seed=0)
        opened = time.perf_counter() - begin
        first, second = together(drawn, 0), together(drawn, 1)
        rates = [(rate(dataset.pack, len(dataset)), rate(drawn.pack, len(drawn))) for _ in range(3)]
        stored, anew = (sorted(each)[1] for each in zip(*rates, strict=True))
        print(
            f"{path.rstrip('/').rpartition('/')[2]}: {len(dataset):,} packs of {dataset.seq_len:,}, "
            f"{int(dataset.index.num_segments.sum()):,} segments ({drawn.share_movable:.0%} have another of their "
            f"length), opened in {opened:.2f} s; of {len(first):,} packs of several segments "
            f"{len(first & second) / max(1, len(first)):.0%} come again; read at {anew:.0f} Mtok/s, stored ones at "
            f"{stored:.0f}"
        )


if __name__ == "__main__":
    main()
