"""MDS and litdata: packs as samples of the formats that stream from object stores, written by their own libraries.

Each sample is a dictionary of one-dimensional arrays (`pipeline/export/samples.py`) and the name of its source.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.building.progress import Progress
from pipeline.export.samples import column_types, rows_of, sample_of, windows_of
from shards.errors import PackError, reason_of
from shards.reader import Dataset

CHUNK_BYTES = 1 << 26  # of a file: what both recommend


def write_mds(dataset: Dataset, out: Path, progress: Progress) -> None:
    """Write MDS shards and their `index.json`.

    Raises:
        PackError: mosaicml-streaming is not installed, or does not load.
    """
    writer_of = load_library("streaming", "mosaicml-streaming", "mds").MDSWriter
    columns = {name: f"ndarray:{np.dtype(kind)}" for name, kind in column_types(dataset).items()} | {"source": "str"}
    with writer_of(out=str(out), columns=columns, size_limit=CHUNK_BYTES) as writer:
        for sample in _samples(dataset, progress):
            writer.write(sample)


def write_litdata(dataset: Dataset, out: Path, progress: Progress) -> None:
    """Write litdata's chunks and their `index.json`.

    Raises:
        PackError: litdata is not installed, or does not load.
    """
    load_library("litdata", "litdata", "litdata")
    writer = import_module("litdata.streaming.writer").BinaryWriter(str(out), chunk_bytes=CHUNK_BYTES)
    for number, sample in enumerate(_samples(dataset, progress)):
        writer[number] = sample
    writer.done()
    writer.merge()


def load_library(module: str, package: str, to: str) -> Any:
    """Import the library that writes a format.

    Raises:
        PackError: It is not installed, or does not load.
    """
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision beside another build of torch raises RuntimeError
        raise PackError(
            f'`to="{to}"`: {package} cannot be imported ({reason_of(error)}); expected it, since it writes its own '
            "format. Install it as docs/export.md says."
        ) from error


def _samples(dataset: Dataset, progress: Progress) -> Iterator[dict[str, Any]]:
    for window in windows_of(dataset):
        source = dataset.shards[window]["source"]
        for row in rows_of(dataset, window):
            yield {**sample_of(row), "source": source}
            progress.on_progress(0, len(row["input_ids"]), 0)
