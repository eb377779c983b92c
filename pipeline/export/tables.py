"""Parquet: packs as rows, for `datasets`, TRL, axolotl and the like, and as Megatron-Bridge reads them.

A row group holds about a million tokens: readers that fetch a random row read its whole group. Ids are left without
dictionaries, which cost time and save nothing on a vocabulary of this size.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.building.progress import Progress
from pipeline.export.samples import PROVENANCE, Sample, column_types, origin_of, rows_of, sample_of, windows_of
from shards.reader import Dataset, Row
from shards.schema import BATCH_TOKENS

SOURCE = "source"


def write_parquet(dataset: Dataset, out: Path, progress: Progress) -> None:
    """Write one Parquet file a window, named as `datasets` finds the split "train"."""
    windows = windows_of(dataset)
    names = [f"train-{number:05d}-of-{len(windows):05d}.parquet" for number in range(len(windows))]
    _write_tables(dataset, dict(zip(windows, names, strict=True)), column_types(dataset), sample_of, out, progress)


def write_bridge(dataset: Dataset, out: Path, progress: Progress) -> None:
    """Write one Parquet file a window with the columns of Megatron-Bridge's packed datasets."""
    names = {window: f"packs-{window:05d}.idx.parquet" for window in windows_of(dataset)}
    kinds: dict[str, type[np.generic]] = {
        "input_ids": np.int32,
        "loss_mask": np.int8,
        "seq_start_id": np.int32,
        **PROVENANCE,
    }
    _write_tables(dataset, names, kinds, bridge_sample, out, progress)


def bridge_sample(row: Row) -> Sample:
    """Return a pack without padding as Megatron-Bridge has it: the mask says of each token whether the next is trained.

    Example:
        Segments [5, 6, 7] and [8, 9] with the mask [0, 1, 1, 0, 1] give `loss_mask` [1, 1, 0, 1, 0] and
        `seq_start_id` [0, 3].
    """
    ahead = np.zeros(len(row["loss_mask"]), np.int8)
    ahead[:-1] = row["loss_mask"][1:]  # no segment's first token is a target, so none is predicted across a boundary
    return {
        "input_ids": row["input_ids"].astype(np.int32),
        "loss_mask": ahead,
        "seq_start_id": row["cu_seqlens"][:-1],
        **{name: np.asarray(row[name]) for name in PROVENANCE},
    }


def _write_tables(
    dataset: Dataset,
    names: dict[int, str],
    kinds: dict[str, type[np.generic]],
    sample: Callable[[Row], Sample],
    out: Path,
    progress: Progress,
) -> None:
    """Write a file for each window, its rows made by `sample`."""
    schema = pa.schema(
        [
            *(pa.field(name, pa.list_(pa.from_numpy_dtype(kind)), nullable=False) for name, kind in kinds.items()),
            pa.field(SOURCE, pa.dictionary(pa.int32(), pa.string()), nullable=False),
        ],
        metadata={"shardpack": json.dumps(origin_of(dataset))},
    )
    packed = {"position_ids": "DELTA_BINARY_PACKED"} if "position_ids" in kinds else {}
    for window, name in names.items():
        source = dataset.shards[window][SOURCE]
        with pq.ParquetWriter(
            out / name,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=[SOURCE],
            column_encoding={f"{column}.list.element": encoding for column, encoding in packed.items()},
            write_statistics=False,
        ) as writer:
            for samples in in_groups(map(sample, rows_of(dataset, window))):
                table = pa.Table.from_arrays([*_columns(samples, kinds), _same(source, len(samples))], schema=schema)
                writer.write_table(table, row_group_size=len(samples))
                progress.on_progress(0, sum(len(each["input_ids"]) for each in samples), 0)


def in_groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Yield runs of samples with about `BATCH_TOKENS` tokens each."""
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        group.append(sample)
        tokens += len(sample["input_ids"])
        if tokens >= BATCH_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _columns(samples: list[Sample], kinds: dict[str, type[np.generic]]) -> Iterator[pa.Array]:
    for name, kind in kinds.items():
        rows = [sample[name] for sample in samples]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
        values = np.concatenate(rows).astype(kind, copy=False)
        yield pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _same(value: str, number: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(number, np.int32)), pa.array([value]))
