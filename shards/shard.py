"""One mapped shard: Arrow buffers as numpy views, each batch checked when it is first asked for.

A file may have been damaged, or made by somebody else: Arrow checks little when it opens a stream, and a wrong offset
would read memory behind the map. So a batch is validated in full, and its rows are checked in one vectorised pass
(about 100 million tokens a second), before any row of it is handed out: no later access needs a check.
"""

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shards.errors import FormatError
from shards.schema import TOKEN_COLUMNS
from shards.tables.mapped import RESTORE, check_size, column_names


@dataclass(frozen=True)
class ArrowBatch:
    """One record batch as numpy views."""

    num_rows: int
    lists: dict[str, tuple[np.ndarray, np.ndarray]]
    "List columns: values, and int32 offsets (num_rows + 1,)."
    rows: dict[str, np.ndarray]
    "Columns of one number per row."

    def row(self, name: str, number: int) -> np.ndarray:
        """Return a row of a list column."""
        values, offsets = self.lists[name]
        return values[offsets.item(number) : offsets.item(number + 1)]


Check = Callable[[ArrowBatch, int], None]


class Shard:
    """One mapped Arrow file.

    Args:
        path: The file.
        expected_bytes: Its size according to the shard list.
        schema: The schema that it must have, metadata included; None takes what is there.
        check: Called with each batch and its first row before the batch is handed out for the first time; raises where
            a row breaks a rule.

    Raises:
        FormatError: The file is missing, has another size or schema, or is no Arrow stream.
    """

    def __init__(
        self, path: Path, expected_bytes: int, schema: pa.Schema | None = None, check: Check = lambda *_: None
    ) -> None:
        check_size(path, expected_bytes)
        self.path, self._check = path, check
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), expected_bytes, access=mmap.ACCESS_READ)
        self._buffer = pa.py_buffer(self._map)
        try:
            with pa.ipc.open_stream(pa.BufferReader(self._buffer)) as stream:
                self.schema = stream.schema
                self._arrow = list(stream)
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"{path}: is not a readable Arrow stream (rule F4). {RESTORE}", "F4") from error
        if schema is not None and not self.schema.equals(schema, check_metadata=True):
            raise FormatError(
                f"{path}: has columns {column_names(self.schema)} of other types or metadata than the plan fixes "
                f"(rule F6). {RESTORE}",
                "F6",
            )
        self.starts: list[int] = list(accumulate((batch.num_rows for batch in self._arrow), initial=0))
        "First row of each batch, then the number of rows."
        self._batches: list[ArrowBatch | None] = [None] * len(self._arrow)

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def num_batches(self) -> int:
        """Number of record batches."""
        return len(self._arrow)

    def batch_of(self, row: int) -> int:
        """Return the number of the batch that holds `row`; empty batches are passed over."""
        return bisect_right(self.starts, row) - 1

    def batch(self, number: int) -> ArrowBatch:
        """Return a batch as views, validated in full the first time.

        Raises:
            FormatError: Its offsets or buffers are wrong, or a row breaks a rule.
        """
        batch = self._batches[number]
        if batch is None:
            batch = self._view(self._arrow[number])
            self._check(batch, self.starts[number])
            self._batches[number] = batch  # only now: another thread must not find it unchecked
        return batch

    def _view(self, batch: pa.RecordBatch) -> ArrowBatch:
        try:
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise FormatError(f"{self.path}: holds a damaged record batch (rule F4). {RESTORE}", "F4") from error
        lists, rows = {}, {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self._check_buffers(column)
            if pa.types.is_list(column.type):
                lists[name] = self._list(name, column)
            else:
                rows[name] = numbers_of(column)
        for name in TOKEN_COLUMNS:
            if name in lists and not np.array_equal(lists[name][1], lists["input_ids"][1]):
                raise FormatError(f"{self.path}: {name} and input_ids differ in length (rule F7). Build again.", "F7")
        return ArrowBatch(batch.num_rows, lists, rows)

    def _list(self, name: str, column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        values = numbers_of(column.values)
        offsets = numbers_of(column.offsets) if len(column) else np.zeros(1, np.int32)
        if offsets[0] != 0 or offsets[-1] != len(values):
            raise FormatError(
                f"{self.path}: {name} has {len(values):,} values, its rows {offsets[0]:,} to {offsets[-1]:,} of them "
                f"(rule F6). {RESTORE}",
                "F6",
            )
        return values, offsets

    def _check_buffers(self, column: pa.Array) -> None:
        """Refuse nulls, and buffers that do not lie in the file: those of a compressed stream."""
        begin, end = self._buffer.address, self._buffer.address + self._buffer.size
        inside = all(
            buffer is None or not buffer.size or begin <= buffer.address <= buffer.address + buffer.size <= end
            for buffer in column.buffers()
        )
        values = column.values if pa.types.is_list(column.type) else column
        if not inside or column.null_count or values.null_count or column.offset:
            raise FormatError(f"{self.path}: holds nulls or compressed buffers (rule F6). {RESTORE}", "F6")

    def advise(self, rows: Iterable[int], names: Iterable[str] = TOKEN_COLUMNS) -> None:
        """Ask the kernel to read the token columns of rows from disk now."""
        for row in rows:
            number = self.batch_of(row)
            batch, local = self.batch(number), row - self.starts[number]
            for name in names:
                if name not in batch.lists:
                    continue
                values, offsets = batch.lists[name]
                place: int = values.__array_interface__["data"][0] - self._buffer.address
                begin = place + int(offsets[local]) * values.itemsize
                length = int(offsets[local + 1] - offsets[local]) * values.itemsize
                page = begin - begin % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, page, begin + length - page)


def numbers_of(array: pa.Array) -> np.ndarray:
    """Return an Arrow array of numbers without nulls as a read-only view; `to_numpy` would import pandas, 0.7 s."""
    dtype, buffer = np.dtype(array.type.to_pandas_dtype()), array.buffers()[1]
    if not len(array) or buffer is None:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def columns_of(batch: ArrowBatch, local: int) -> dict[str, Any]:
    """Return every column of one row: arrays as views, figures as ints."""
    columns: dict[str, Any] = {name: batch.row(name, local) for name in batch.lists}
    return columns | {name: int(values[local]) for name, values in batch.rows.items()}
