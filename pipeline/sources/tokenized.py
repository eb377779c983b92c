"""Records that are token ids already, as flat arrays: columns of tables, objects of JSONL.

Nothing is judged here but the shape: what is a list of integers in every row becomes one flat array with offsets, and a
row that is none becomes a fault with its reason. Whether ids, labels and boundaries fit is for
`pipeline/documents/tokenized.py`.

    {"input_ids": [5, 6]}, {"input_ids": [7]}, {"input_ids": null}
    values [5, 6, 7], offsets [0, 2, 3, 3], faults {2: "field 'input_ids' is null; expected a list of integers"}
"""

from array import array
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.config import RecordOptions
from pipeline.sources.parsing import changes_targets, fields_of, name_of
from shards.shard import numbers_of

# each tells documents of a row
SEQ_LENGTHS, CU_SEQLENS, SEQ_START_ID, POSITION_IDS = "seq_lengths", "cu_seqlens", "seq_start_id", "position_ids"
ATTENTION_MASK = "attention_mask"


class Ragged(NamedTuple):
    """Lists of numbers, one per row, end to end."""

    values: npt.NDArray[Any]
    "int64, or narrower integers where a file holds such; float64 of weights; (num_values,)"
    offsets: npt.NDArray[np.int64]
    "int64 (num_rows + 1,): where each row begins in `values`."

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Values per row; int64 (num_rows,)."""
        return np.diff(self.offsets)

    def rows(self, start: int, stop: int) -> "Ragged":
        """Return rows [start, stop)."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def row(self, index: int) -> npt.NDArray[Any]:
        """Return the values of one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]


class TokenTable:
    """Rows of token ids and what lies beside them.

    Args:
        columns: By field; the same number of rows in each.
        faults: Reasons by row, for rows of another shape; such a row is empty in the column that is at fault.
        beside: Fields that are not read and look as if they changed what the ids mean; which rows have them, bool
            (num_rows,).
    """

    def __init__(
        self,
        columns: dict[str, Ragged],
        faults: dict[int, str] | None = None,
        beside: dict[str, npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        self.columns, self.faults, self.beside = columns, faults or {}, beside or {}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).offsets) - 1

    @overload
    def __getitem__(self, index: int) -> dict[str, list[Any]]: ...
    @overload
    def __getitem__(self, index: slice) -> "TokenTable": ...
    def __getitem__(self, index: int | slice) -> "dict[str, list[Any]] | TokenTable":
        """Return one row, or a table of some that follow one another."""
        if isinstance(index, int):
            return {name: column.row(index).tolist() for name, column in self.columns.items()}
        start, stop, _ = index.indices(len(self))
        columns = {name: column.rows(start, stop) for name, column in self.columns.items()}
        faults = {row - start: why for row, why in self.faults.items() if start <= row < stop}
        return TokenTable(columns, faults, {name: rows[start:stop] for name, rows in self.beside.items()})

    def digest(self) -> bytes:
        """Return 16 bytes that follow from lengths and values alone, whatever the file's types."""
        digest = xxhash.xxh3_128()
        for column in self.columns.values():
            digest.update(column.lengths.tobytes())
            exact = np.float64 if column.values.dtype.kind == "f" else np.int64
            digest.update(np.ascontiguousarray(column.values, exact).tobytes())
        return digest.digest()


def token_fields(names: Collection[str], options: RecordOptions) -> list[str]:
    """Return the fields that are read of records with these: the named ones, and what tells documents of a row."""
    beside = [name for name in (options.labels_field, options.mask_field) if name is not None]
    if options.weights_field is not None and options.weights_field in names:
        beside.append(options.weights_field)
    known = [name for name in (SEQ_LENGTHS, CU_SEQLENS, SEQ_START_ID, POSITION_IDS, ATTENTION_MASK) if name in names]
    return list(dict.fromkeys([options.ids_field, *beside, *known]))


def table_of_batch(batch: Any, options: RecordOptions, beside: Collection[str] = ()) -> TokenTable:
    """Return the token columns of an Arrow record batch, without a copy where its types allow.

    Args:
        batch: The columns that are read, at least.
        options: Names them.
        beside: Other columns of its file that look as if they mattered: every row counts as having them.
    """
    columns: dict[str, Ragged] = {}
    faults: dict[int, str] = {}
    for name in token_fields(batch.schema.names, options):
        column = batch.column(name)
        if name == options.weights_field:
            values, lengths = column.to_pylist(), columns[options.ids_field].lengths.tolist()
            lists = [_numbers(value, length) for value, length in zip(values, lengths, strict=True)]
            columns[name] = _ragged(lists, np.float64)
            for row in (row for row, found in enumerate(lists) if found is None):
                faults.setdefault(row, _fault_of(name, {name: values[row]}, True))
        else:
            columns[name] = _of_arrow(name, column, faults)
    return TokenTable(columns, faults, {name: np.ones(batch.num_rows, bool) for name in beside})


def table_of_records(records: Sequence[dict[str, Any]], options: RecordOptions) -> TokenTable:
    """Return the token fields of objects as they stand in JSONL."""
    columns: dict[str, Ragged] = {}
    faults: dict[int, str] = {}
    names = {name for record in records for name in record}
    needed = {options.ids_field, options.labels_field, options.mask_field}
    for name in token_fields(names, options):
        if name == options.weights_field:
            lengths = columns[options.ids_field].lengths.tolist()
            lists: list[Any] = [_numbers(record.get(name), n) for record, n in zip(records, lengths, strict=True)]
            columns[name] = _ragged(lists, np.float64)
        else:
            lists = [_integers(record.get(name, () if name not in needed else None)) for record in records]
            columns[name] = _ragged(lists, np.int64)
        for row, found in enumerate(lists):
            if found is None:
                faults.setdefault(row, _fault_of(name, records[row], name == options.weights_field))
    rest = sorted(name for name in names - columns.keys() if changes_targets(name))
    return TokenTable(columns, faults, {name: _has_value(records, name) for name in rest})


def _has_value(records: Sequence[dict[str, Any]], name: str) -> npt.NDArray[np.bool_]:
    return np.array([record.get(name) not in (None, "", [], {}) for record in records], bool)


def _ragged(lists: list[npt.NDArray[Any] | None], kind: type[np.generic]) -> Ragged:
    """Put lists end to end; one that is none is empty."""
    arrays = [np.zeros(0, kind) if found is None else found for found in lists]
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
    return Ragged(np.concatenate([np.zeros(0, kind), *arrays]), offsets)


def _numbers(value: Any, length: int) -> npt.NDArray[np.float64] | None:
    """Return a list of numbers as an array, one number as many times as there are ids; None for anything else."""
    if value is None:
        return np.ones(length)
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in items):
        return None
    return np.array(items if isinstance(value, list) else items * length, np.float64)


def _integers(value: Any) -> npt.NDArray[np.int64] | None:
    """Return a list of integers as an array; None for anything else."""
    if not isinstance(value, list | tuple):
        return None
    try:
        return np.array(array("q", value))  # half again as fast as numpy, which looks for a type first
    except (TypeError, OverflowError):
        return None


def _fault_of(name: str, record: dict[str, Any], weights: bool = False) -> str:
    if weights:
        return f"field {name!r} is {name_of(record[name])}; expected a number, or a list of one for each id"
    if name not in record:
        return f"no field {name!r}, {fields_of(record)}; expected a list of integers"
    value = record[name]
    if not isinstance(value, list):
        return f"field {name!r} is {name_of(value)}; expected a list of integers"
    odd = next((item for item in value if isinstance(item, bool) or not isinstance(item, int)), None)
    what = "numbers beyond 64 bits" if odd is None else name_of(odd)
    return f"field {name!r} holds {what}; expected integers"


def _of_arrow(name: str, column: Any, faults: dict[int, str]) -> Ragged:
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, kind = len(column), column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    item = kind.value_type if is_list else None
    if item is None or not (pa.types.is_integer(item) or pa.types.is_boolean(item)):
        what = f"is of type {kind}" if item is None else f"holds values of type {item}"
        faults.update(dict.fromkeys(range(rows), f"field {name!r} {what}; expected a list of integers") | faults)
        return Ragged(np.zeros(0, np.int64), np.zeros(rows + 1, np.int64))
    sizes = pc.list_value_length(column)
    lengths = numbers_of(pc.fill_null(sizes, 0) if column.null_count else sizes).astype(np.int64)
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else np.zeros(0, bool)
    for row in np.flatnonzero(nulls).tolist():
        faults.setdefault(row, f"field {name!r} is null; expected a list of integers")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    values = column.flatten()  # leaves out what null rows hold
    if values.null_count:
        places = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
        for row in np.unique(np.searchsorted(offsets, places, side="right") - 1).tolist():
            faults.setdefault(row, f"field {name!r} holds null; expected integers")
        values = pc.fill_null(values, False if pa.types.is_boolean(item) else 0)
    found = values.to_numpy(zero_copy_only=False) if pa.types.is_boolean(item) else numbers_of(values)
    return Ragged(found.astype(np.int64) if found.dtype.kind in "bu" and found.dtype.itemsize > 4 else found, offsets)
