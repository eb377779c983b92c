"""Data saved by other tools: datasets folders, hub datasets, Arrow and Parquet metadata.

A folder of `save_to_disk`, and a hub dataset once `datasets` has put it into its cache, are lists of Arrow files. Only
finding the hub's needs `datasets`; workers map the files themselves.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote
from typing import Any

import orjson

from pipeline.sources.files import is_url, open_source
from shards.errors import SourceError, quiet_hub, reason_of

CONTINUES = b"\xff\xff\xff\xff"  # begins every message of an Arrow stream
STREAM_END = CONTINUES + bytes(4)
COMPRESSED = (  # first bytes, name, way out
    (b"\x1f\x8b\x08", "gzip", "Decompress it (gzip -dc), or give a file whose name ends in .gz."),
    (b"\x28\xb5\x2f\xfd", "zstd", "Decompress it (zstd -dc), or give a file whose name ends in .zst."),
    (b"\xfd7zXZ\0", "xz", "Decompress it (xz -dc)."),
)


def saved_files(path: str) -> list[str] | None:
    """Return the Arrow files of a `save_to_disk` folder, in its own order; None for other directories.

    Raises:
        SourceError: The folder holds several splits, or its state cannot be read.
    """
    splits = os.path.join(path, "dataset_dict.json")
    if os.path.isfile(splits):
        names = orjson.loads(_read(splits)).get("splits", [])
        if len(names) != 1:
            one = quote(os.path.join(path, *names[:1]))
            raise SourceError(f"{path}: holds the splits {', '.join(names)}; expected one. Name it, such as {one}.")
        return saved_files(os.path.join(path, names[0]))
    state = os.path.join(path, "state.json")
    if not os.path.isfile(state) or not os.path.isfile(os.path.join(path, "dataset_info.json")):
        return None
    try:
        content = orjson.loads(_read(state))
        return [os.path.join(path, entry["filename"]) for entry in content["_data_files"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise SourceError(f"{state}: not the state of a saved dataset ({error!r}). Save the dataset again.") from None


def hub_files(spec: str) -> list[tuple[str, str]]:
    """Fetch a dataset through `datasets`, and return (stable name, path) of its Arrow files.

    Args:
        spec: hf:NAME[/CONFIG][:SPLIT]; NAME may be a directory here. The split is train by default.

    Raises:
        SourceError: There is no such dataset, configuration or split.
    """
    import datasets

    name, split = spec[3:], "train"
    head, _, tail = name.rpartition(":")
    if head and "/" not in tail and not os.path.exists(name):
        name, split = head, tail
    if not name.strip("/"):
        raise SourceError(f"{spec} names no dataset; expected hf:NAME, hf:NAME/CONFIG or hf:NAME:SPLIT.")
    faults: list[Exception] = []
    for path, config in _candidates(name):
        try:
            with quiet_hub(), _quiet(datasets):
                dataset = datasets.load_dataset(path, config, split=split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            faults.append(error)
            continue
        files = [entry["filename"] for entry in dataset.cache_files]
        if sum(sum(arrow_units(file, name)) for file in files) != len(dataset):
            raise SourceError(f"{spec}: is a part of its files; expected a whole split. Use save_to_disk first.")
        return [(f"{name}:{split}/{os.path.basename(file)}", file) for file in files]
    raise SourceError(
        f"{spec}: no such dataset or split here or on the hub ({reason_of(faults[0])}). "
        "Check the name, the split and the network, or give files or a directory."
    )


def _candidates(name: str) -> Iterator[tuple[str, str | None]]:
    """Read NAME[/CONFIG] in every way it can be meant, the likeliest first."""
    parts = name.split("/")
    if os.path.isdir(name):
        yield name, None
    elif os.path.isdir(os.path.dirname(name)):
        yield os.path.dirname(name), os.path.basename(name)
    elif len(parts) == 3:
        yield "/".join(parts[:2]), parts[2]
    else:
        yield name, None
        if len(parts) == 2:
            yield parts[0], parts[1]


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Keep the library's progress bars off the terminal."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def parquet_units(location: str, name: str) -> tuple[int, ...]:
    """Return the uncompressed bytes of each row group.

    Raises:
        SourceError: The file is not Parquet.
    """
    import pyarrow.parquet as pq

    with reading_as("Parquet", name), open_source(location) as stream:
        metadata = pq.ParquetFile(stream).metadata
        return tuple(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def arrow_units(location: str, name: str) -> tuple[int, ...]:
    """Return the rows of each record batch of a local Arrow file; nothing for a URL.

    Raises:
        SourceError: The file is not Arrow.
    """
    if is_url(location):
        return ()
    with reading_as("Arrow", name):
        return tuple(batch.num_rows for batch in arrow_batches(location))


def arrow_batches(location: str) -> Iterator[Any]:
    """Yield the record batches of an Arrow file; a local one is mapped, not copied."""
    import pyarrow as pa

    source: Any = pa.PythonFile(open_source(location), mode="r") if is_url(location) else pa.memory_map(location)
    with source:
        yield from ipc_batches(source)


def ipc_batches(source: Any) -> Iterator[Any]:
    """Yield the record batches of an Arrow IPC stream or file, opened by pyarrow."""
    import pyarrow as pa

    head = source.read(6)
    source.seek(0)
    if head == b"ARROW1":
        reader = pa.ipc.open_file(source)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    if head.startswith(CONTINUES):  # not the older form, whose end is harder to tell from data
        source.seek(max(0, source.size() - 8))
        if source.read(8) != STREAM_END:  # cut between two batches it would read as a whole, shorter stream
            raise pa.ArrowInvalid("the mark at the end of the stream is missing, the file seems cut off")
        source.seek(0)
    yield from pa.ipc.open_stream(source)


@contextmanager
def reading_as(kind: str, name: str) -> Iterator[None]:
    """Turn what pyarrow raises for a file that is not what its name says into a `SourceError`."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name}: cannot be read as {kind} ({reason_of(error)}). Write the file again.") from None


def refuse_foreign(head: bytes, name: str) -> None:
    """Raise SourceError for a file that should be text and begins with the mark of UTF-16 or of compressed data."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise SourceError(f"{name}: is UTF-16; expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8.")
    for mark, kind, remedy in COMPRESSED:
        if head.startswith(mark):
            raise SourceError(f"{name}: is {kind} data, which its name does not say; expected text in UTF-8. {remedy}")


def is_lines(head: bytes) -> bool:
    """Whether a file that begins so holds one JSON object per line, whatever its name says."""
    line, newline, _ = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if not newline or not line.startswith(b"{"):
        return False
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _read(path: str) -> bytes:
    with open_source(path) as stream:
        return stream.read()
