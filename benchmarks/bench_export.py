"""How fast is a dataset written in the formats that shardpack writes itself?

Random ids of a 150,000-entry vocabulary, log-normal lengths. The formats take turns in one process; CPU seconds hold
reading, checking every row, joining documents, compressing and writing. Beside them stands what the disk takes.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from random_dataset import write_dataset
from write_up import WriteUp, figure, middle, run, tell

from pipeline import DatasetExportConfig, export_dataset

PACKAGES = ("shardpack", "numpy", "pyarrow")
FORMATS = {"megatron": 4, "megatron-bridge": 5, "parquet": 12}  # bytes a token of the arrays that are written
SEQ_LEN, VOCAB_SIZE, MEAN_TOKENS = 8192, 150_000, 490


def measure(arguments: argparse.Namespace) -> WriteUp:
    """Export a dataset in each format, several times."""
    documents = (2_000_000 if arguments.quick else arguments.tokens) // MEAN_TOKENS
    lengths = np.clip(np.random.default_rng(0).lognormal(5.7, 1.0, documents), 2, SEQ_LEN).astype(np.int64)
    rows, tokens = [], int(lengths.sum())
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        scratch = Path(directory)
        write_dataset(scratch / "dataset", lengths, SEQ_LEN, VOCAB_SIZE)
        found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in FORMATS}
        for repeat in range(arguments.repeats + 1):  # the first warms the page cache
            for name in FORMATS:
                out, begin, cpu = scratch / name, time.perf_counter(), time.process_time()
                result = export_dataset(DatasetExportConfig(dataset=scratch / "dataset", to=name, out=out))
                found[name].append((time.perf_counter() - begin, time.process_time() - cpu, result.bytes))
                tell(f"{name}: {found[name][-1]}")
                if repeat == arguments.repeats:
                    found[name] = found[name][1:]
                shutil.rmtree(out)
        for name, runs in found.items():
            rows.append(
                [
                    name,
                    figure(runs[0][2] / 1e6),
                    middle([seconds for seconds, _, _ in runs]),
                    middle([cpu for _, cpu, _ in runs]),
                    middle([tokens / cpu / 1e6 for _, cpu, _ in runs]),
                    middle([FORMATS[name] * tokens / cpu / 1e6 for _, cpu, _ in runs]),
                    middle([size / cpu / 1e6 for _, cpu, size in runs]),
                ]
            )
        disk = disk_speed(scratch / "disk", 1 << 28)
    columns = ["format", "written, MB", "seconds", "CPU seconds", "Mtok a CPU second"]
    columns += ["MB of arrays a CPU second", "MB of files a CPU second"]
    setting = (
        f"{tokens:,} tokens in documents of {MEAN_TOKENS} on average, packed at {SEQ_LEN:,}. Median (range) of "
        f"{arguments.repeats} runs, page cache warm. Random ids compress worse than text. The disk takes "
        f"{figure(disk / 1e6)} MB/s of bytes that lie in memory."
    )
    return WriteUp("Writing other formats", [setting], [("", columns, rows)])


def disk_speed(path: Path, size: int) -> float:
    """Return bytes a second of one synced write."""
    data, begin = np.random.default_rng(0).bytes(size), time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return size / (time.perf_counter() - begin)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add size and place."""
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens of the dataset")
    parser.add_argument("--scratch", type=Path, default=None, help="directory for 2 GB")


if __name__ == "__main__":
    run("export", __doc__ or "", measure, PACKAGES, add_flags)
