"""Megatron's pairs of .bin and .idx: documents, one pair a source, since Megatron blends by file.

The segments of a document are joined again, wherever they were packed. The format knows neither masks nor weights:
whoever trains on it trains on every token.
"""

from pathlib import Path
from typing import IO

import numpy as np

from pipeline.building.progress import Progress
from pipeline.building.repack import join_documents
from pipeline.export.naming import file_stems
from pipeline.export.samples import rows_of, windows_by_source, windows_of
from pipeline.sources.token_files import DTYPES, MAGIC
from shards.publish import write
from shards.reader import Dataset

VERSION = 1
CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}


def write_megatron(dataset: Dataset, out: Path, progress: Progress) -> None:
    """Write `<source>_document.bin` and `.idx` for every source."""
    dtype = np.dtype(dataset.layout.token_type.to_pandas_dtype())
    by_source = windows_by_source(dataset)
    for source, stem in file_stems(by_source).items():
        lengths: list[np.ndarray] = []
        with (out / f"{stem}_document.bin").open("wb") as file:
            for window in by_source[source]:
                documents = join_documents(dataset, window).documents
                write(file, documents.input_ids.astype(dtype, copy=False).data)
                lengths.append(documents.lengths)
                progress.on_progress(len(documents.doc_ids), len(documents.input_ids), 0)
        with (out / f"{stem}_document.idx").open("wb") as file:
            write_index(file, np.concatenate(lengths), dtype)


def write_index(file: IO[bytes], lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write the index of a .bin: its type, and the length, place and bounds of every document.

    Args:
        file: Where to.
        lengths: Tokens per document; int64 (num_documents,).
        dtype: Type of the ids.
    """
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1]) * dtype.itemsize])[: len(lengths)]
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    head = MAGIC + VERSION.to_bytes(8, "little") + CODES[dtype].to_bytes(1, "little")
    write(file, head + len(lengths).to_bytes(8, "little") + len(bounds).to_bytes(8, "little"))
    for part in (lengths.astype("<i4"), pointers.astype("<i8"), bounds.astype("<i8")):
        write(file, part.tobytes())


def untrained_tokens(dataset: Dataset) -> int:
    """Return how many tokens are read but not trained, the first of each document left out: nothing predicts those."""
    if not dataset.layout.loss_mask:
        return 0
    totals = dataset.manifest["totals"]
    inside = totals["tokens"]["packed"] - totals["segments"] - totals["targets"]["packed"]
    if inside or totals["segments"] == totals["documents"]["packed"]:
        return inside
    # where documents were cut, the mask of a segment's first token is kept beside the row
    rows = (row for window in windows_of(dataset) for row in rows_of(dataset, window))
    return sum(int(((row["doc_offsets"] > 0) & (row["start_targets"] == 0)).sum()) for row in rows)
