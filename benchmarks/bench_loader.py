"""How fast do batches come out of a dataset on disk, against other formats and against copying the bytes?

The same random rows of `--seq-len` tokens stand in every format; one epoch is read in random order, page cache warm,
by one process. `memcpy` copies the ids, positions and masks that this format stores, in its order: nothing that copies
can be faster. "host" is what stays on the host beside a GPU: rows copied into a pinned buffer, narrow; "batch" also
makes the int64 tensors that a model takes, which a GPU does by itself. Other formats yield ids alone (memmap, litdata),
so they do less; `datasets` reads the same directory. litdata is compared where it is installed.

    python benchmarks/bench_loader.py --quick
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_dataset import write_dataset
from write_up import WriteUp, middle, run, tell

from shards import Dataset
from trainer import PackedCollator, PackLoader
from trainer.loader import _Filler as Filler

PACKAGES = ("shardpack", "torch", "datasets", "litdata", "pyarrow", "numpy")
VOCABULARY = 50_000
Epoch = Callable[[], int]


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


def memmap(dataset: Dataset, folder: Path, packs: int) -> Iterator[tuple[str, str, Epoch]]:
    """Yield the reader of a flat file of ids, as small trainers have it."""
    file = folder / "ids.bin"
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


def litdata(dataset: Dataset, folder: Path, packs: int) -> Iterator[tuple[str, str, Epoch]]:
    """Yield the reader of litdata's token chunks."""
    from litdata import StreamingDataset
    from litdata import TokensLoader as Blocks
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder / "lit"), chunk_bytes="64MB", item_loader=Blocks(block_size=dataset.seq_len))
    for row in range(len(dataset)):
        writer[row] = torch.from_numpy(dataset.pack(row)[0].astype(np.int32))
    writer.done()
    writer.merge()

    def epoch() -> int:
        rows = StreamingDataset(str(folder / "lit"), item_loader=Blocks(block_size=dataset.seq_len), shuffle=True)
        batches = torch.utils.data.DataLoader(rows, batch_size=packs, drop_last=True)
        return sum(batch.numel() for batch in batches)

    yield "litdata, token blocks, ids alone", "batch", epoch


def measure(arguments: argparse.Namespace) -> WriteUp:
    tokens = arguments.seq_len * 64 if arguments.quick else arguments.tokens
    notes = []
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as name:
        folder = Path(name)
        lengths = np.random.default_rng(0).integers(1, arguments.seq_len // 2, 4 * tokens // arguments.seq_len)
        dataset = write_dataset(folder / "data", lengths, arguments.seq_len, VOCABULARY)
        readers = [*ours(dataset, arguments.packs), *memmap(dataset, folder, arguments.packs)]
        readers += hugging_face(dataset, arguments.packs)
        if importlib.util.find_spec("litdata"):
            readers += litdata(dataset, folder, arguments.packs)
        else:
            notes.append("litdata is not installed: left out.")
        seconds: dict[str, list[float]] = {reader: [] for reader, _, _ in readers}
        counts = {}
        for _ in range(arguments.repeats + 1):  # the first warms the page cache
            for reader, _, epoch in readers:
                begin = time.perf_counter()
                counts[reader] = epoch()
                seconds[reader].append(time.perf_counter() - begin)
                tell(f"{reader}: {counts[reader] / seconds[reader][-1] / 1e6:,.0f} Mtok/s")
        fastest = min(seconds[readers[0][0]][1:])
        stored = sum(record["bytes"] for record in dataset.manifest["shards"]) / int(dataset.index.num_tokens.sum())
    rows = []
    for reader, what, _ in readers:
        speeds = [counts[reader] / s / 1e6 for s in seconds[reader][1:]]
        cost = [s / counts[reader] * counts[readers[0][0]] / fastest for s in seconds[reader][1:]]
        rows.append([reader, what, middle(speeds), middle(cost)])
    notes += [f"{reader} read {count:,} tokens." for reader, count in counts.items() if count != counts[readers[0][0]]]
    setting = (
        f"{tokens:,} tokens in packs of {arguments.seq_len}, {arguments.packs} packs in a batch, {stored:.2f} bytes a "
        f"token on disk, {torch.get_num_threads()} torch threads. Median (range) of {arguments.repeats} epochs."
    )
    return WriteUp(
        "Batches from disk", [setting], [("", ["reader", "makes", "Mtok/s", "time, memcpy = 1"], rows)], notes
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1 << 26, help="tokens in the dataset, about 5 bytes each")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--packs", type=int, default=4, help="packs in a batch")


if __name__ == "__main__":
    run("loader", __doc__ or "", measure, PACKAGES, add_flags)
