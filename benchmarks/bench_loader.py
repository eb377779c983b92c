"""How fast do batches come out of a dataset on disk, against other formats and against copying the bytes?

The same random rows of `--seq-len` tokens stand in every format; one epoch is read in random order, page cache warm,
by one process. `memcpy` copies the ids, positions and masks that this format stores, in its order: nothing that copies
can be faster. "host" is what stays on the host beside a GPU: rows copied into a pinned buffer, narrow; "batch" also
makes the int64 tensors that a model takes, which a GPU does by itself. Other formats yield ids alone (memmap, litdata,
MDS), so they do less; `datasets` reads the same directory. litdata and MDS run in environments of their own (`peers.py`
makes them), each in a process that waits for its turn.

    python benchmarks/bench_loader.py --quick
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peers
import torch
from random_dataset import write_dataset
from write_up import WriteUp, middle, run, tell

from shards import Dataset
from trainer import PackedCollator, PackLoader
from trainer.feeding.feed import _Filler as Filler

PACKAGES = ("shardpack", "torch", "datasets", "pyarrow", "numpy")
PEERS = {"litdata": "litdata, token blocks, ids alone", "mosaicml-streaming": "MDS, ids alone"}
VOCABULARY = 50_000
Epoch = Callable[[], int]


class Timing(NamedTuple):
    """One epoch."""

    tokens: int
    wall: float
    cpu: float
    "Seconds of all threads."


def timed(epoch: Epoch) -> Callable[[], Timing]:
    """Return a call that runs and times an epoch in this process."""

    def run_epoch() -> Timing:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = epoch()
        return Timing(tokens, time.perf_counter() - wall, time.process_time() - cpu)

    return run_epoch


def timed_there(epoch: Callable[[], tuple[int, float]]) -> Callable[[], Timing]:
    """Return the same for an epoch in another process, which says how much CPU it took."""

    def run_epoch() -> Timing:
        wall = time.perf_counter()
        tokens, cpu = epoch()
        return Timing(tokens, time.perf_counter() - wall, cpu)

    return run_epoch


def ours(dataset: Dataset, packs: int) -> Iterator[tuple[str, str, Epoch]]:
    """Yield the readers of this project."""
    order = np.random.default_rng(0).permutation(len(dataset))
    batches = order[: len(order) // packs * packs].reshape(-1, packs)
    size = packs * dataset.seq_len
    filler = Filler(dataset, size, False, None)
    buffers = filler.buffers(pin=False)

    def host() -> int:
        return sum(filler.fill(buffers, rows)[0]["num_tokens"] for rows in batches)

    def loader() -> int:
        return sum(batch["num_tokens"] for batch in PackLoader(dataset, tokens_per_batch=size))

    def copy() -> int:
        ids, positions, mask = np.empty(size, np.uint16), np.empty(size, np.uint16), np.empty(size, np.uint8)
        total = 0
        for rows in batches:
            at = 0
            for row in rows.tolist():
                source_ids, source_positions, source_mask, _ = arrays[row]
                stop = at + len(source_ids)
                ids[at:stop], positions[at:stop], mask[at:stop] = source_ids, source_positions, source_mask
                at = stop
            total += at
        return total

    arrays = [dataset.pack(row) for row in range(len(dataset))]
    yield "memcpy of ids, positions, masks", "host", copy
    yield "shardpack, buffers filled", "host", host
    yield "shardpack, PackLoader", "batch", loader


def memmap(dataset: Dataset, file: Path, packs: int) -> Iterator[tuple[str, str, Epoch]]:
    """Write a flat file of ids and yield its reader, as small trainers have it."""
    with file.open("wb") as out:
        for row in range(len(dataset)):
            dataset.pack(row)[0].tofile(out)
    seq_len, rng = dataset.seq_len, np.random.default_rng(0)
    blocks = int(dataset.index.num_tokens.sum()) // seq_len

    def epoch() -> int:
        ids, total = np.memmap(file, np.uint16, "r"), 0
        for starts in rng.permutation(blocks)[: blocks // packs * packs].reshape(-1, packs) * seq_len:
            rows = [torch.from_numpy(ids[start : start + seq_len].astype(np.int64)) for start in starts.tolist()]
            total += torch.stack(rows).numel()
        return total

    yield "np.memmap, ids alone", "batch", epoch


def hugging_face(dataset: Dataset, packs: int) -> Iterator[tuple[str, str, Epoch]]:
    """Yield readers of the same directory through `datasets`."""
    import datasets

    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    table = datasets.load_from_disk(str(dataset.path))
    collate = PackedCollator()

    def epoch_of(rows: Any) -> Epoch:
        def epoch() -> int:
            total = 0
            for start in range(0, len(order) // packs * packs, packs):
                batch = collate([rows[i] for i in order[start : start + packs]])
                total += batch["input_ids"].numel()
            return total

        return epoch

    columns = ["input_ids", "cu_seqlens", "loss_mask"]
    yield "datasets, numpy rows", "batch", epoch_of(table.with_format("numpy", columns=columns))
    yield "datasets, Python lists (the default)", "batch", epoch_of(table.select_columns(columns))


def measure(arguments: argparse.Namespace) -> WriteUp:
    tokens = arguments.seq_len * 64 if arguments.quick else arguments.tokens
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as name, ExitStack() as stack:
        folder = Path(name)
        lengths = np.random.default_rng(0).integers(1, arguments.seq_len // 2, 4 * tokens // arguments.seq_len)
        dataset = write_dataset(folder / "data", lengths, arguments.seq_len, VOCABULARY)
        ids, packs = folder / "ids.bin", arguments.packs
        here = [*ours(dataset, packs), *memmap(dataset, ids, packs), *hugging_face(dataset, packs)]
        readers = [(reader, what, timed(epoch)) for reader, what, epoch in here]
        present = [peer for peer in PEERS if peers.python_of(peer)]
        for peer in present:
            there = stack.enter_context(peers.reader(peer, ids, dataset.seq_len, packs))
            readers.append((PEERS[peer], "batch", timed_there(there)))
        timings: dict[str, list[Timing]] = {reader: [] for reader, _, _ in readers}
        for _ in range(arguments.repeats + 1):  # the first warms the page cache
            for reader, _, run_epoch in readers:
                timings[reader].append(run_epoch())
                tell(f"{reader}: {timings[reader][-1].tokens / timings[reader][-1].wall / 1e6:,.0f} Mtok/s")
        stored = sum(record["bytes"] for record in dataset.shards) / int(dataset.index.num_tokens.sum())
    bound = timings[readers[0][0]]
    fastest = min(timing.wall / timing.tokens for timing in bound[1:])
    rows = []
    for reader, what, _ in readers:
        each = timings[reader][1:]
        speeds = [timing.tokens / timing.wall / 1e6 for timing in each]
        cost = [timing.wall / timing.tokens / fastest for timing in each]
        rows.append([reader, what, middle(speeds), middle(cost), middle([t.cpu / t.tokens * 1e9 for t in each])])
    counts = {reader: timings[reader][0].tokens for reader in timings}
    notes = [f"{reader} read {count:,} tokens." for reader, count in counts.items() if count != bound[0].tokens]
    notes += [f"{PEERS[peer]}: {peers.versions(peer)}." for peer in present] + peers.missing(list(PEERS))
    setting = (
        f"{tokens:,} tokens in packs of {arguments.seq_len}, {arguments.packs} packs in a batch, {stored:.2f} bytes a "
        f"token on disk, {torch.get_num_threads()} torch threads. Median (range) of {arguments.repeats} epochs."
    )
    return WriteUp(
        "Batches from disk",
        [setting],
        [("", ["reader", "makes", "Mtok/s", "time, memcpy = 1", "CPU ns/token"], rows)],
        notes,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1 << 26, help="tokens in the dataset, about 5 bytes each")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--packs", type=int, default=4, help="packs in a batch")


if __name__ == "__main__":
    run("loader", __doc__ or "", measure, PACKAGES, add_flags)
