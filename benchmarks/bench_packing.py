"""How fast and how tight is each packer, and how does it compare with others in the same run?

Lengths only, no tokens copied (but by TRL, whose packer cannot do without). Seconds are CPU seconds of this process,
one core; each figure is the median of `--repeats` runs after one warm-up, with the range. "above" is the distance to
the lower bound (max of total / capacity and Martello-Toth L2). Distributions: see `DISTRIBUTIONS`; `real` draws from
the lengths of English text that anyone can get, counted in `lengths.json` (`length_histogram.py` made it).

    python benchmarks/bench_packing.py --quick      # seconds, to see that it works
    python benchmarks/bench_packing.py              # all cases, about half an hour, writes benchmarks/results/
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from write_up import WriteUp, run, tell

from pipeline.packing.kernels import always_compile
from pipeline.packing.packers import PACKERS, Bins, length_histogram, lower_bound
from pipeline.packing.packers import _best_tree as best_tree
from shards.ordering.step_order import ORDERS, StepOrder

PACKAGES = ("shardpack", "numpy", "numba", "trl", "seqpacker")
PEER_LIMIT = 100_000  # most lengths for a packer written in Python: about 10 us each


def lognormal(rng: np.random.Generator, n: int, median: float, sigma: float) -> np.ndarray:
    return rng.lognormal(np.log(median), sigma, n)


def split_long(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Cut what is longer than `seq_len` into parts, as a build would."""
    whole, rest = np.divmod(lengths.astype(np.int64), seq_len)
    return np.concatenate([np.full(whole.sum(), seq_len), rest[rest > 0]])


def adversarial(seq_len: int, n: int) -> np.ndarray:
    """The 11/9 instance: first-fit decreasing needs 11 bins where 9 do."""
    half, quarter, copies = seq_len // 2, seq_len // 4, n // 30
    sizes = [half + 1, quarter + 2, quarter + 1, quarter - 2]
    return np.repeat(sizes, [6 * copies, 6 * copies, 6 * copies, 12 * copies])


def real(rng: np.random.Generator, n: int, seq_len: int) -> np.ndarray:
    """Draw from the lengths of a corpus, long ones cut."""
    found = json.loads(Path(__file__).with_name("lengths.json").read_text())
    shares = np.array(found["documents"]) / sum(found["documents"])
    return rng.permutation(split_long(rng.choice(found["lengths"], n, p=shares), seq_len))[:n]


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "sft": lambda rng, n, c: np.clip(lognormal(rng, n, 300, 1.0), 1, min(8192, c)),
    "web": lambda rng, n, c: rng.permutation(split_long(lognormal(rng, n, 500, 1.4).clip(1), c))[:n],
    "uniform": lambda rng, n, c: rng.integers(1, c, n, endpoint=True),
    "chat": lambda rng, n, c: np.clip(lognormal(rng, n, 60, 0.8), 1, c),
    "adv": lambda rng, n, c: np.where(np.arange(n) % 2, c // 2, c // 3) + rng.integers(1, c // 50, n),
    "adv119": lambda rng, n, c: adversarial(c, n),
    "real": real,
    "mid": lambda rng, n, c: np.clip(lognormal(rng, n, 0.3 * c, 0.35), c // 8, c),
}


def lengths_of(name: str, n: int, seq_len: int, seed: int = 0) -> np.ndarray:
    """Return `n` lengths (one or two fewer for adv119), int32."""
    return DISTRIBUTIONS[name](np.random.default_rng(seed), n, seq_len).astype(np.int32)


def plain_next_fit(lengths: np.ndarray, seq_len: int) -> int:
    """Next-fit as trainers write it: a Python loop over a list."""
    bins: list[list[int]] = [[]]
    used = 0
    for i, length in enumerate(lengths.tolist()):
        if used + length > seq_len:
            bins.append([])
            used = 0
        bins[-1].append(i)
        used += length
    return len(bins)


def trl_packer(lengths: np.ndarray, seq_len: int) -> Callable[[], int]:
    """Return TRL's best-fit decreasing on all rows at once; nothing is longer than `seq_len`, so no token is lost."""
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    column = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1], np.int8)))
    table = pa.table({"input_ids": column})
    return lambda: len(_pack_bfd(table, seq_len))


def seqpacker(lengths: np.ndarray, seq_len: int) -> Callable[[], int]:
    """Return seqpacker's default rule (Rust), by its call that returns arrays."""
    from seqpacker import Packer

    packer, values = Packer(capacity=seq_len, strategy="obfd"), lengths.astype(np.int64)
    return lambda: len(packer.pack_flat(values)[1]) + 1  # its offsets leave out the first bin's 0


PEERS: dict[str, Callable[[np.ndarray, int], Callable[[], int]]] = {
    "plain next-fit": lambda lengths, seq_len: lambda: plain_next_fit(lengths, seq_len),
    **({"trl bfd": trl_packer} if importlib.util.find_spec("trl") else {}),
    **({"seqpacker obfd": seqpacker} if importlib.util.find_spec("seqpacker") else {}),
}


class Timing(NamedTuple):
    """CPU seconds of several runs, and what they gave."""

    median: float
    low: float
    high: float
    bins: int

    def __str__(self) -> str:
        return f"{self.median * 1e3:,.1f} ({self.low * 1e3:,.1f} to {self.high * 1e3:,.1f})"


def timed(run: Callable[[], int], repeats: int, warm_up: bool = True) -> Timing:
    """Time `run`; what takes 5 s and more runs once."""
    if warm_up:
        run()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        bins = run()
        seconds.append(time.process_time() - start)
        if seconds[0] >= 5:
            break
    return Timing(float(np.median(seconds)), min(seconds), max(seconds), bins)


def case_rows(name: str, seq_len: int, n: int, repeats: int) -> Iterator[list[str]]:
    """Time every packer and every peer on one case."""
    lengths = lengths_of(name, n, seq_len)
    bound, tokens = lower_bound(lengths, seq_len), int(lengths.sum(dtype=np.int64))
    peers = {
        peer: timed(make(lengths, seq_len), 1 if peer == "trl bfd" else repeats, warm_up=False)
        for peer, make in PEERS.items()
        if n <= PEER_LIMIT or peer.startswith("seqpacker")
    }
    tight = [timing.median for peer, timing in peers.items() if peer != "plain next-fit"]

    def ours(packer: str, seed: int | None) -> Timing:
        return timed(lambda: PACKERS[packer](lengths, seq_len, seed=seed).num_bins, repeats)

    found = {packer: ours(packer, 0) for packer in PACKERS} | {"auto, not dealt": ours("auto", None)}
    for packer, timing in sorted(found.items()) + list(peers.items()):
        comparable = tight and timing.median and packer.startswith(("auto", "bfd", "ffd"))
        ratio = f"{min(tight) / timing.median:,.0f}" if comparable else ""
        fill, above = tokens / (timing.bins * seq_len), timing.bins / bound - 1
        case = [name, f"{seq_len:,}", f"{n:,}", packer]
        yield [*case, str(timing), f"{timing.bins:,}", f"{fill:.3%}", f"{above:.4%}", ratio]


def search_rows(capacities: list[int], sizes: list[int], repeats: int) -> Iterator[list[str]]:
    """Time the search alone: from histogram to plan, without dealing out the segments."""
    for name in ("sft", "mid", "adv119"):
        for seq_len in capacities:
            for n in sizes:
                histogram = length_histogram(lengths_of(name, n, seq_len), seq_len)
                bound = lower_bound(lengths_of(name, n, seq_len), seq_len)
                timing = timed(lambda h=histogram, b=bound: best_tree(h, 1 << 40, b).num_bins, repeats)
                yield [name, f"{seq_len:,}", f"{n:,}", str(timing), f"{timing.bins / bound - 1:.4%}"]


def memory_rows(n: int) -> Iterator[list[str]]:
    """Measure the peak beyond input and output, each in a fresh process."""
    for name in ("sft", "mid"):
        for packer in ("ffd", "auto"):
            code = f"import bench_packing; print(bench_packing.peak_beyond({name!r}, {packer!r}, {n}))"
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
            )
            yield [name, "8,192", f"{n:,}", packer, f"{int(done.stdout) / 2**20:.1f}"]


def peak_beyond(name: str, packer: str, n: int, seq_len: int = 8192) -> int:
    """Bytes that one call needs at its peak beyond its input and output (Linux)."""

    def resident(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    always_compile()
    PACKERS[packer](lengths_of("mid", 1000, seq_len), seq_len)  # loads the machine code
    lengths = lengths_of(name, n, seq_len)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    bins = PACKERS[packer](lengths, seq_len)
    return resident("VmHWM") - before - bins.order.nbytes - bins.offsets.nbytes


def straggler_rows(num_packs: int) -> Iterator[list[str]]:
    """Compare orders on packs of the default packer: slowest rank / mean, 64 ranks, cost L + L^2 / 24576."""
    for name, seq_len, mean in (("sft", 8192, 490), ("web", 32768, 1300)):
        lengths = lengths_of(name, num_packs * seq_len // mean, seq_len).astype(np.int64)
        bins: Bins = PACKERS["auto"](lengths, seq_len)
        sums = [np.add.reduceat(v[bins.order], bins.offsets[:-1]) for v in (lengths, lengths * (lengths + 1) // 2)]
        index = SimpleNamespace(num_tokens=sums[0], num_targets=sums[0], attention_pairs=sums[1])
        for kind in ORDERS:
            for batches in (1, 8):
                order = StepOrder(index, packs_per_step=64 * batches, order=kind)
                yield [name, f"{seq_len:,}", kind, str(batches), f"{order.straggler_factor(0, 64):.4f}"]


def measure(arguments: argparse.Namespace) -> WriteUp:
    always_compile()
    sizes = [10_000] if arguments.quick else arguments.sizes
    capacities = [8192] if arguments.quick else arguments.seq_lens
    cases = [(name, c, n) for name in arguments.distributions for c in capacities for n in sizes]

    def told(rows: Iterator[list[str]]) -> list[list[str]]:
        found = []
        for row in rows:
            tell(" | ".join(row))  # the whole takes long
            found.append(row)
        return found

    columns = ["lengths", "seq_len", "n", "packer", "CPU ms", "bins", "fill", "above", "x peer"]
    return WriteUp(
        "Packers: speed and tightness",
        [
            "CPU ms on one core: median (range). above: over the lower bound. x peer: time of the fastest peer that "
            "packs by best fit over this one's."
        ],
        [
            ("", columns, told(row for case in cases for row in case_rows(*case, arguments.repeats))),
            (
                "The plan alone: histogram to bins, segments not dealt out",
                ["lengths", "seq_len", "n", "CPU ms", "above"], told(search_rows(capacities, sizes, arguments.repeats)),
            ),
            (
                "Peak memory beyond input and output", ["lengths", "seq_len", "n", "packer", "MiB"],
                told(memory_rows(max(sizes))),
            ),
            (
                "Straggler factor on 64 ranks: slowest / mean",
                ["lengths", "seq_len", "order", "micro-batches", "factor"],
                told(straggler_rows(2_000 if arguments.quick else 100_000)),
            ),
        ],
    )  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--distributions", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS))


if __name__ == "__main__":
    run("packing", __doc__ or "", measure, PACKAGES, add_flags)
