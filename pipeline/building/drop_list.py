"""Documents to drop, as people list them: one id a line, or a table that may say more than which.

812                       a doc_id
0:17                      window and record
{"doc_id": 812}           JSONL, or Parquet with that column; `doc_part` names one document of a record
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shards.errors import PackError, counted, reason_of
from shards.plan import Plan, corpus_id
from shards.schema import doc_id

NAMES = {"doc_id", "doc_part"}
CONDITION = re.compile(r"\s*(?P<column>[A-Za-z_]\w*)\s*(?P<operator><=|>=|==|!=|<|>)\s*(?P<value>\S.*?)\s*")
OPERATORS = {"<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal", "==": "equal", "!=": "not_equal"}


class DropList(NamedTuple):
    """Documents that are left out, ascending."""

    doc_ids: np.ndarray
    "int64 (n,)"
    doc_parts: np.ndarray
    "int32 (n,), -1 for all documents of the record"
    rows: np.ndarray
    "int64 (n,): line or row of the file, from 1"
    where: str
    "The file."
    digest: str
    "Of the documents, whatever the form and order of the file."
    corpus_id: str | None = None
    "The corpus that the file says it is of, see `shards.plan.corpus_id`."

    def holds(self, ids: np.ndarray, parts: np.ndarray | None, window: int) -> np.ndarray:
        """Return which documents of a window are listed; bool, shape of `ids`."""
        first, last = np.searchsorted(self.doc_ids, [doc_id(window, 0), doc_id(window + 1, 0)])
        listed, of_parts = self.doc_ids[first:last], self.doc_parts[first:last]
        found: np.ndarray = np.isin(ids, listed[of_parts < 0])
        named = of_parts >= 0
        if named.any():
            part = np.zeros(len(ids), np.int64) if parts is None else parts.astype(np.int64)
            keys = set(zip(listed[named].tolist(), of_parts[named].tolist(), strict=True))
            found |= np.array([key in keys for key in zip(ids.tolist(), part.tolist(), strict=True)], bool)
        return found

    def check_corpus(self, plan: Plan) -> None:
        """Refuse a list that says that it is of another corpus.

        Raises:
            PackError: Names the file.
        """
        if self.corpus_id not in (None, corpus_id(plan)):
            raise PackError(
                f"`drop`: {self.where}; is of another corpus, where the same numbers are other documents; expected a "
                "list for this one. Score this dataset with pack score."
            )

    def check(self, window: int, num_records: int) -> None:
        """Refuse a document of a window that has fewer records.

        Raises:
            PackError: Names the file, the row and the document.
        """
        self._refuse(self.doc_ids, (self.doc_ids >> 32 == window) & (self.doc_ids & 0xFFFFFFFF >= num_records))

    def check_windows(self, num_windows: int) -> None:
        """Refuse a document of a window that the dataset does not have.

        Raises:
            PackError: Names the file, the row and the document.
        """
        self._refuse(self.doc_ids, (self.doc_ids < 0) | (self.doc_ids >> 32 >= num_windows))

    def _refuse(self, ids: np.ndarray, bad: np.ndarray) -> None:
        if bad.any():
            first = int(np.flatnonzero(bad)[self.rows[bad].argmin()])
            window, record = int(ids[first]) >> 32, int(ids[first]) & 0xFFFFFFFF
            raise PackError(
                f"{self.where}, row {self.rows[first]:,}: no record {window}:{record} in the corpus "
                f"({counted(int(bad.sum()), 'such document')}); expected documents of this dataset. "
                "Is it a list for another one?"
            )


def read_drop_list(path: str | Path, condition: str | None = None) -> DropList:
    """Read a list of documents.

    Args:
        path: Parquet (`.parquet`), JSONL (`.jsonl`, `.json`) or text.
        condition: Which rows of a table count, such as "loss > 6"; a row without that value never does.

    Raises:
        PackError: The file cannot be read, names no documents, or needs or does not fit a condition.
    """
    table, told = _read(Path(path))
    num_rows = len(next(iter(table.values()))) if table else 0
    if "doc_id" not in table:
        raise PackError(f"`drop`: {path}; has the columns {', '.join(table) or 'none'}; expected doc_id among them.")
    more = sorted(table.keys() - NAMES, key=lambda name: (name != "loss", name))
    if more and condition is None:
        raise PackError(
            f"`drop`: {path} has more columns than documents ({', '.join(more)}); expected to hear which rows count. "
            f"Add `drop_where`, such as '{more[0]} > 6', or keep doc_id alone."
        )
    chosen = np.ones(num_rows, bool) if condition is None else _matching(table, condition, str(path))
    rows = np.flatnonzero(chosen) + 1
    ids = _whole_numbers(table["doc_id"], chosen, rows, f"{path}", "doc_id")
    parts = np.full(len(rows), -1, np.int64)
    if "doc_part" in table:
        parts = _whole_numbers(table["doc_part"], chosen, rows, f"{path}", "doc_part")
    order = np.lexsort((parts, ids))
    pairs = np.stack([ids[order], parts[order]], axis=1)
    digest = xxhash.xxh3_128_hexdigest(np.unique(pairs, axis=0).astype("<i8").tobytes())
    return DropList(ids[order], parts[order].astype(np.int32), rows[order], str(path), digest, told)


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the columns of a table as numpy arrays, and the corpus that it says it is of."""
    import pyarrow as pa

    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            table = pq.read_table(path)
            columns = [name for name in table.column_names if not pa.types.is_nested(table.schema.field(name).type)]
            told = (table.schema.metadata or {}).get(b"corpus_id")
            return {name: _numpy(table[name]) for name in columns}, None if told is None else told.decode()
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        if path.suffix in (".jsonl", ".json") or next(filter(None, lines), "").startswith("{"):
            records = [json.loads(line) for line in lines if line]
            names = dict.fromkeys(name for record in records for name in record)
            return {name: np.array([record.get(name) for record in records], object) for name in names}, None
        return {
            "doc_id": np.array([_parse(line, f"{path}, row {row}") for row, line in enumerate(lines, 1)], object)
        }, None
    except (OSError, pa.ArrowException) as error:
        raise PackError(f"`drop`: {path}; cannot be read ({reason_of(error)}). Check the path.") from error
    except (ValueError, AttributeError) as error:
        raise PackError(f"`drop`: {path}; is not JSONL ({reason_of(error)}). Give one object a line.") from error


def _numpy(column: Any) -> np.ndarray:
    values: np.ndarray = column.to_numpy()
    return values


def _parse(line: str, where: str) -> int:
    window, colon, record = line.rpartition(":")
    if not record.isdecimal() or (colon and not window.isdecimal()):
        raise PackError(f"{where}: {line!r}; expected a doc_id, or window:record such as 0:17. Fix the line.")
    return doc_id(int(window), int(record)) if colon else int(record)


def _matching(table: dict[str, Any], condition: str, where: str) -> np.ndarray:
    """Return which rows fulfil a condition; bool."""
    import pyarrow as pa
    import pyarrow.compute as pc

    match = CONDITION.fullmatch(condition)
    if match is None or match["column"] not in table:
        raise PackError(
            f"`drop_where`: {condition!r}; expected COLUMN OPERATOR VALUE such as 'loss > 6', with one of the columns "
            f"{', '.join(table)} of {where} and one of {' '.join(OPERATORS)}."
        )
    column = pa.array(table[match["column"]], from_pandas=True)
    text = match["value"]
    try:
        value: Any = text[1:-1] if text[0] in "'\"" and text[-1] == text[0] else float(text)
        found = pc.call_function(OPERATORS[match["operator"]], [column, pa.scalar(value)])
    except (ValueError, pa.ArrowException):
        raise PackError(
            f"`drop_where`: {condition!r}; {match['column']} of {where} holds {column.type}; expected a value to "
            "compare with it, a number or 'text' in quotes."
        ) from None
    rows: np.ndarray = np.asarray(pc.fill_null(found, False))
    return rows


def _whole_numbers(column: Any, chosen: np.ndarray, rows: np.ndarray, where: str, name: str) -> np.ndarray:
    """Return a column of whole numbers, 0 or more."""
    values = np.asarray(column)[chosen]
    if values.dtype.kind == "i" and (values >= 0).all():
        found: np.ndarray = values.astype(np.int64)
        return found
    for row, value in zip(rows.tolist(), values.tolist(), strict=True):
        if not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63):
            raise PackError(f"{where}, row {row:,}: {name} is {value!r}; expected a whole number, 0 or more.")
    numbers: np.ndarray = values.astype(np.int64)
    return numbers
