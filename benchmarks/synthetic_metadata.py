"""The metadata of a dataset that is not there: shard list, index and manifest of any number of shards and packs.

    python benchmarks/synthetic_metadata.py DIRECTORY --shards 1000000 --packs-per-shard 1800

The shard list is written in full. The index is a sparse file: 1.8 billion packs would take 50 GB of disk, its values
are all 0 and take none, so that what is read of it costs page faults and no disk. Shards are holes of the right size,
where there are so few that opening looks at their sizes.
"""

import argparse
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shards.counts import empty_counts
from shards.manifest import INDEX_FILE, Manifest, SourceSums
from shards.metadata import read_shard_list
from shards.plan import FORMAT, VERSION, make_plan, make_source, plan_id, stored_columns
from shards.publish import LocalStore, canonical, seal
from shards.reader import MAX_SIZES_CHECKED
from shards.schema import layout_of
from shards.tables.mapped import TableEntry, write_table
from shards.tables.shard_list import SHARDS_FILE, SHARDS_SCHEMA, dataset_id
from shards.writer import arrow_array

SEQ_LEN = 8192
PART = 1 << 16
HOLE_BYTES = 1 << 16  # writes of zeros from this size on become holes


def write_metadata(path: Path, num_shards: int, packs_per_shard: int, sources: int = 2) -> Path:
    """Write the metadata of `num_shards` shards of about `packs_per_shard` packs each."""
    store = LocalStore(path)
    store.create()
    plan = make_plan(
        seq_len=SEQ_LEN,
        loss_mask=False,
        tokenizer={"digest": "0" * 64, "vocab_size": 100_000, "max_id": 99_999},
        sources=[make_source(f"source-{number}") for number in range(sources)],
    )
    store.put("plan.json", canonical(plan))
    parts = list(_shard_list(num_shards, packs_per_shard, sources))
    packs = sum(int(part["packs"].sum()) for part in parts)
    shards = write_table(store, SHARDS_FILE, SHARDS_SCHEMA, parts)
    index = _write_sparse(path / INDEX_FILE, layout_of(plan).index_schema(), packs)
    totals = empty_counts()
    totals["packs"] = packs
    manifest: Manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dataset_id": dataset_id(plan_id(plan), parts),
        "plan_id": plan_id(plan),
        "seq_len": SEQ_LEN,
        "packer": "auto",
        "stored": stored_columns(plan),
        "tokenizer": plan["tokenizer"],
        "tokenizer_files": {},
        "totals": totals,
        "sources": SourceSums([source["name"] for source in plan["sources"]]).figures(),
        "maxima": {"max_seqlen": SEQ_LEN, "num_segments": 64},
        "shards": shards,
        "index": index,
        "facts": {},
    }
    store.put("manifest.json", seal(manifest))
    if num_shards <= MAX_SIZES_CHECKED:
        for entry in read_shard_list(path, manifest):
            with (path / entry["file"]).open("wb") as file:
                file.truncate(entry["bytes"])
    return path


def _shard_list(num_shards: int, packs_per_shard: int, sources: int) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    first_pack = 0
    for start in range(0, num_shards, PART):
        number = min(PART, num_shards - start)
        packs = rng.integers(packs_per_shard - packs_per_shard // 50, packs_per_shard + packs_per_shard // 50, number)
        yield {
            "xxh3_128": rng.integers(0, 256, (number, 16), np.uint8),
            "bytes": packs * SEQ_LEN * 6,
            "first_pack": first_pack + np.cumsum(packs) - packs,
            "packs": packs,
            "tokens": packs * SEQ_LEN,
            "segments": packs * 16,
            "source": (np.arange(start, start + number) * sources // num_shards).astype(np.int32),
        }
        first_pack += int(packs.sum())


class _SparseFile:
    """What pyarrow writes to: long writes, which here are zeros, become holes."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < HOLE_BYTES:
            self._file.write(data)
        else:
            self._file.seek(size, 1)
        return size

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Give the file its full size."""
        if not self.closed:
            self._file.truncate(self._file.tell())
            self._file.close()
        self.closed = True


def _write_sparse(path: Path, schema: pa.Schema, rows: int) -> TableEntry:
    zeros = mmap.mmap(-1, rows * 8)  # never touched, so it takes no memory
    columns = [arrow_array(memoryview(zeros)[: rows * field.type.bit_width // 8], field.type, rows) for field in schema]
    sink = _SparseFile(path)
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema) as stream:
        stream.write_batch(pa.record_batch(columns, schema=schema))
    sink.close()
    return {"rows": rows, "bytes": path.stat().st_size, "xxh3_128": "0" * 32}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--packs-per-shard", type=int, default=1800)
    arguments = parser.parse_args()
    print(write_metadata(arguments.directory, arguments.shards, arguments.packs_per_shard))
