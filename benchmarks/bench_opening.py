"""How long until the first step's packs are known, and how much memory a process takes for it?

Synthetic metadata (see synthetic_metadata.py): 10 million packs in 5,500 shards, and 1.8 billion packs in a million.
Each run is a fresh process (Linux) that opens the dataset and names the packs of the first step, then of 200 more.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from synthetic_metadata import write_metadata
from write_up import WriteUp, figure, middle, run, tell

PACKAGES = ("shardpack", "numpy", "pyarrow")
PACKS_PER_STEP = 1024
SIZES = {"10 million packs": (5_500, 1818), "1.8 billion packs": (1_000_000, 1800)}
QUICK = {"20,000 packs": (100, 200)}
MEASURE = f"""
import json, sys, time
from pathlib import Path
import numpy, pyarrow
from shards import Dataset
from shards.ordering.block_order import BlockOrder

def peak():  # of this process alone: ru_maxrss begins with that of its parent
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))

imported = peak()
begin = time.perf_counter()
dataset = Dataset(sys.argv[1])
opened = time.perf_counter()
counts = [source["counts"] for source in dataset.manifest["sources"]]
order = BlockOrder(dataset.shards, dataset.index, counts, packs_per_step={PACKS_PER_STEP})
assert len(order.batches(0, 0, 8)) == 8
first = time.perf_counter()
steps = []
for step in range(1, min(201, order.steps_per_epoch)):
    start = time.perf_counter()
    order.batches(0, step, 8)
    steps.append(time.perf_counter() - start)
steps.sort()
print(json.dumps(dict(
    packs=len(dataset), shards=len(dataset.shards), open=opened - begin, first=first - begin,
    step=steps[len(steps) // 2], slowest=steps[-1], imported=imported, peak=peak(),
)))
"""


def measure(arguments: argparse.Namespace) -> WriteUp:
    """Open each dataset in a fresh process, several times."""
    rows = []
    for name, (shards, packs) in (QUICK if arguments.quick else SIZES).items():
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
            path = write_metadata(Path(directory), shards, packs)
            found = []
            for _ in range(arguments.repeats + 1):  # the first warms the page cache
                done = subprocess.run(
                    [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
                )
                found.append(json.loads(done.stdout))
                tell(f"{name}: {found[-1]}")
        found = found[1:]
        rows.append(
            [
                name,
                f"{found[0]['shards']:,}",
                middle([each["open"] * 1e3 for each in found]),
                middle([each["first"] * 1e3 for each in found]),
                middle([each["step"] * 1e3 for each in found]),
                figure(max(each["slowest"] for each in found) * 1e3),
                figure(max(each["peak"] for each in found) / 1e6),
                figure(max(each["imported"] for each in found) / 1e6),
            ]
        )
    columns = ["dataset", "shards", "open, ms", "open and first step, ms", "each next step, ms", "slowest step, ms"]
    columns += ["peak memory, MB", "of which imports, MB"]
    setting = (
        f"Order block-shuffled, {PACKS_PER_STEP:,} packs a step balanced over 8 ranks. Median (range) of "
        f"{arguments.repeats} processes, page cache warm; the index is a sparse file, so that reading it costs page "
        "faults and no disk. Peak memory counts mapped pages that were touched."
    )
    return WriteUp("Opening large datasets", [setting], [("", columns, rows)])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add where the synthetic metadata goes."""
    parser.add_argument("--scratch", type=Path, default=None, help="directory for 60 MB, on a disk with sparse files")


if __name__ == "__main__":
    run("opening", __doc__ or "", measure, PACKAGES, add_flags)
