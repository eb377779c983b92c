"""Read a dataset through memory maps.

Opening reads the manifest, the index and the size of every shard, no more; a shard is mapped when one of its rows is
first asked for. Sizes are checked before mapping because a file truncated under a map kills the process with SIGBUS.
A row comes back as numpy views on the map: no copy, no list. `pack` is the path of the training loop; `[i]` gives every
column. A dataset pickles as its path, so workers share the page cache instead of copies.
"""

import json
import mmap
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
import xxhash

from shards.errors import FormatError, PackError
from shards.plan import Plan, check_version, parse_plan
from shards.publish import unseal
from shards.schema import INDEX_SCHEMA, ROW_COLUMNS, SEGMENT_COLUMNS, TOKEN_COLUMNS, position_ids_of

Row = dict[str, Any]
MAX_MAPS = 2048  # below the usual limits on maps and open files


@dataclass(frozen=True)
class Index:
    """Per-pack figures of a whole dataset, in pack order; each an array of (num_packs,)."""

    num_tokens: np.ndarray
    num_segments: np.ndarray
    num_targets: np.ndarray
    num_target_segments: np.ndarray
    max_seqlen: np.ndarray
    attention_pairs: np.ndarray


class Pack(NamedTuple):
    """What training needs of one pack."""

    input_ids: np.ndarray
    "uint16 or int32 (num_tokens,)"
    position_ids: np.ndarray
    "uint16 or int32 (num_tokens,): place in the segment"
    loss_mask: np.ndarray
    "uint8 (num_tokens,): 1 where the token in this slot is a target"
    cu_seqlens: np.ndarray
    "int32 (num_segments + 1,)"


@dataclass(frozen=True)
class _ArrowBatch:
    """One record batch as numpy views: list columns as (values, offsets), row columns as arrays."""

    lists: dict[str, tuple[np.ndarray, np.ndarray]]
    rows: dict[str, np.ndarray]


class Shard:
    """One mapped Arrow file.

    Args:
        path: The file.
        expected_bytes: Its size according to the manifest.

    Raises:
        FormatError: The file is missing, has another size, or is no Arrow stream.
    """

    def __init__(self, path: Path, expected_bytes: int) -> None:
        check_size(path, expected_bytes)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), expected_bytes, access=mmap.ACCESS_READ)
        self._base = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]
        try:
            with pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(self._map))) as stream:
                self.schema = stream.schema
                arrow = list(stream)
        except (pa.ArrowInvalid, OSError) as error:
            raise FormatError(
                f"{path}: is not a readable Arrow stream (rule F4). Restore it, or delete it and build with --resume.",
                "F4",
            ) from error
        self.batches = [_views(batch, path) for batch in arrow]
        self.starts: list[int] = list(accumulate((batch.num_rows for batch in arrow), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, row: int) -> tuple[_ArrowBatch, int]:
        """Return the batch that holds `row` and the row's place in it."""
        number = bisect_right(self.starts, row) - 1
        return self.batches[number], row - self.starts[number]

    def advise(self, row: int) -> None:
        """Ask the kernel to read the token columns of `row` from disk now."""
        batch, local = self.locate(row)
        for name in TOKEN_COLUMNS:
            if name in batch.lists:
                values, offsets = batch.lists[name]
                begin = values.__array_interface__["data"][0] - self._base + int(offsets[local]) * values.itemsize
                length = int(offsets[local + 1] - offsets[local]) * values.itemsize
                page = begin - begin % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, page, begin + length - page)


def _views(batch: pa.RecordBatch, path: Path) -> _ArrowBatch:
    lists, rows = {}, {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_list(column.type):
            lists[name] = (column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True))
        else:
            rows[name] = column.to_numpy(zero_copy_only=True)
    for name in TOKEN_COLUMNS:
        if name in lists and not np.array_equal(lists[name][1], lists["input_ids"][1]):
            raise FormatError(f"{path}: {name} and input_ids differ in length (rule F7). Build again.", "F7")
    return _ArrowBatch(lists, rows)


def check_size(path: Path, expected_bytes: int) -> None:
    """Raise FormatError unless `path` is a file of exactly `expected_bytes`."""
    try:
        size = Path(path).stat().st_size
    except FileNotFoundError as error:
        raise FormatError(
            f"{path}: is missing; the manifest lists {expected_bytes:,} bytes (rule F3). "
            "Restore it, or build with --resume.",
            "F3",
        ) from error
    if size != expected_bytes:
        raise FormatError(
            f"{path}: has {size:,} bytes, the manifest says {expected_bytes:,} (rule F3). "
            "Restore it, or delete it and build with --resume.",
            "F3",
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check `manifest.json`.

    Raises:
        FormatError: There is none, it was changed, or another version wrote it.
    """
    file = path / "manifest.json"
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        unfinished = (path / "plan.json").exists()
        state = "holds an unfinished build" if unfinished else "is not a shardpack dataset"
        advice = "Finish it with pack build … --resume." if unfinished else "Name a directory that pack build wrote."
        raise FormatError(f"{path}: {state}; expected manifest.json (rule F1). {advice}", "F1") from error
    try:
        check_version(json.loads(data), str(file))
    except (ValueError, AttributeError) as error:
        raise FormatError(
            f"{file}: is not JSON (rule F1). Restore it, or delete it and build with --resume.", "F1"
        ) from error
    return unseal(data, str(file), "F1")


def read_index(path: Path, record: dict[str, Any]) -> pa.Table:
    """Map `index.arrow` after checking its size and hash against the manifest's record of it."""
    file = path / "index.arrow"
    check_size(file, record["bytes"])
    if not record["bytes"]:
        raise FormatError(f"{file}: is empty (rule F13). Restore it, or delete it and build with --resume.", "F13")
    with file.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    if xxhash.xxh3_128_hexdigest(mapped) != record["xxh3_128"]:
        raise FormatError(
            f"{file}: does not match its checksum in the manifest (rule F13). "
            "Restore it, or delete it and build with --resume.",
            "F13",
        )
    table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))).read_all()
    if table.schema.names != INDEX_SCHEMA.names:
        raise FormatError(
            f"{file}: has columns {table.schema.names}; expected {INDEX_SCHEMA.names} (rule F13). Build again.", "F13"
        )
    return table


class Dataset:
    """A finished dataset: a sequence of packs.

    Args:
        path: The dataset directory.

    Raises:
        FormatError: No dataset, an unfinished one, another format version, or a shard of the wrong size.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if "://" in str(path):
            raise PackError(f"{path}: is a URL; a dataset is read through memory maps. Copy it to a local disk first.")
        self.manifest = read_manifest(self.path)
        self.dataset_id: str = self.manifest["dataset_id"]
        self.seq_len: int = self.manifest["seq_len"]
        self.packer: str = self.manifest["packer"]
        self.max_token_id: int = self.manifest["tokenizer"]["max_id"]
        self._shards = self.manifest["shards"]
        for record in self._shards:
            check_size(self.path / record["file"], record["bytes"])
        self._starts: list[int] = list(accumulate((record["rows"] for record in self._shards), initial=0))
        table = read_index(self.path, self.manifest["index"])
        self.index = Index(**{name: table.column(name).to_numpy() for name in INDEX_SCHEMA.names})
        self._maps: OrderedDict[int, Shard] = OrderedDict()
        self._lock = Lock()  # the prefetch thread and the caller may map at once

    def __reduce__(self) -> tuple[type["Dataset"], tuple[Path]]:
        return (Dataset, (self.path,))

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r}, {', '.join(f'{name} {value}' for name, value in self._figures())})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in self._figures())
        return f"<table><caption>{escape(str(self.path))}</caption>{rows}</table>"

    def _figures(self) -> list[tuple[str, str]]:
        """What a person wants to know first, by name."""
        totals = self.manifest["totals"]
        tokens, packs = totals["tokens"]["packed"], len(self)
        return [
            ("packs", f"{packs:,}"),
            ("seq_len", f"{self.seq_len:,}"),
            ("tokens", f"{tokens:,}"),
            ("targets", f"{totals['targets']['packed']:,}"),
            ("documents", f"{totals['documents']['packed']:,}"),
            ("fill_rate", f"{tokens / max(1, packs * self.seq_len):.2%}"),
            ("packer", self.packer),
            ("dataset_id", self.dataset_id[:12]),
        ]

    @property
    def plan(self) -> Plan:
        """The plan that the dataset was built from."""
        file = self.path / "plan.json"
        try:
            return parse_plan(file.read_bytes(), str(file))
        except FileNotFoundError as error:
            raise FormatError(f"{file}: is missing (rule F2). Restore it, or build again.", "F2") from error

    @property
    def sources(self) -> list[tuple[str, int, int]]:
        """Name, first pack and one past the last pack of each run of shards from one source."""
        runs: list[tuple[str, int, int]] = []
        for record, first in zip(self._shards, self._starts, strict=False):
            stop = first + record["rows"]
            if runs and runs[-1][0] == record["source"]:
                runs[-1] = (record["source"], runs[-1][1], stop)
            else:
                runs.append((record["source"], first, stop))
        return runs

    def shard_of(self, pack: int) -> tuple[dict[str, Any], int]:
        """Return the manifest record of the shard that holds `pack`, and the pack's row in it."""
        number = self._number(pack)
        return self._shards[number], pack - self._starts[number]

    def _number(self, pack: int) -> int:
        if not 0 <= pack < len(self):
            raise IndexError(f"{self.path}: has {len(self):,} packs; there is no pack {pack}")
        return bisect_right(self._starts, pack) - 1

    def _shard(self, pack: int) -> tuple[Shard, int]:
        number = self._number(pack)
        with self._lock:
            shard = self._maps.get(number)
            if shard is None:
                record = self._shards[number]
                shard = self._maps[number] = Shard(self.path / record["file"], record["bytes"])
                if len(self._maps) > MAX_MAPS:
                    self._maps.popitem(last=False)  # views that are still in use keep their map alive
            else:
                self._maps.move_to_end(number)
        return shard, pack - self._starts[number]

    def pack(self, pack: int) -> Pack:
        """Return what training needs of one pack, as read-only views on the map; positions not stored are derived."""
        shard, row = self._shard(pack)
        batch, local = shard.locate(row)
        lists = batch.lists
        ids, offsets = lists["input_ids"]
        begin, end = offsets.item(local), offsets.item(local + 1)  # of all token columns, as checked when mapping
        cu = _row(batch, "cu_seqlens", local)
        positions = lists["position_ids"][0][begin:end] if "position_ids" in lists else position_ids_of(cu)
        return Pack(ids[begin:end], positions, lists["loss_mask"][0][begin:end], cu)

    @overload
    def __getitem__(self, pack: int) -> Row: ...

    @overload
    def __getitem__(self, pack: slice) -> list[Row]: ...

    def __getitem__(self, pack: int | slice) -> Row | list[Row]:
        """Return every column of one pack: arrays as views, per-row figures as ints; of a slice, a list of them.

        Raises:
            IndexError: There is no such pack.
            FormatError: The shard that holds it is damaged.
        """
        if isinstance(pack, slice):
            return [self[number] for number in range(*pack.indices(len(self)))]
        pack = pack + len(self) if pack < 0 else pack
        shard, row = self._shard(pack)
        batch, local = shard.locate(row)
        ids, positions, mask, cu = self.pack(pack)
        columns: Row = {"input_ids": ids, "position_ids": positions, "cu_seqlens": cu, "loss_mask": mask}
        columns |= {name: _row(batch, name, local) for name in SEGMENT_COLUMNS}
        return columns | {name: int(batch.rows[name][local]) for name in ROW_COLUMNS}

    def advise(self, packs: Any) -> None:
        """Start reading the given packs from disk, without waiting."""
        for pack in packs:
            shard, row = self._shard(int(pack))
            shard.advise(row)


def _row(batch: _ArrowBatch, name: str, local: int) -> np.ndarray:
    values, offsets = batch.lists[name]
    return values[offsets.item(local) : offsets.item(local + 1)]
