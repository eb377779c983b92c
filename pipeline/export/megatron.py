"""Megatron's pairs of .bin and .idx: documents, one pair a source, since Megatron blends by file.

The segments of a document are joined again, wherever they were packed. The format knows neither masks nor weights:
whoever trains on it trains on every token.
"""

from pathlib import Path
from typing import IO

import numpy as np

from pipeline.building.progress import Progress
from pipeline.building.repacking.joining import join_documents
from pipeline.export.naming import file_stems
from pipeline.export.samples import windows_by_source
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
