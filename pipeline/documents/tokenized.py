"""Token ids that come with the corpus -> documents: checked row by row, packed rows taken apart. No tokenizer runs.

A row is one document, unless a column tells that several were packed into it:

    input_ids [5, 6, 7, 8], seq_lengths [3, 1]       two documents, [5, 6, 7] and [8], parts 0 and 1 of the record
    position_ids [0, 1, 2, 0], cu_seqlens [0, 3, 4]  the same, said in other ways

Labels stand in the places of their ids, unshifted, -100 where there is no target (the convention of transformers).
Where `seq_start_id` tells the documents, rows are Megatron-Bridge's, whose mask says of each token whether the next one
is trained; it is moved to the targets.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from pipeline.config import RecordOptions
from pipeline.documents.messages import MAX_WEIGHT, MIN_WEIGHT, check_weight
from pipeline.documents.unread_fields import UnreadFields, refusal
from pipeline.sources.reader import RecordBatch
from pipeline.sources.tokenized import (
    ATTENTION_MASK,
    CU_SEQLENS,
    POSITION_IDS,
    SEQ_LENGTHS,
    SEQ_START_ID,
    Ragged,
    TokenTable,
    table_of_records,
)
from pipeline.tokens import Documents
from shards.errors import SourceError

NO_TARGET = -100
Rows = npt.NDArray[np.bool_]


def tokenized_documents(
    batch: RecordBatch, options: RecordOptions, max_id: int, unread: UnreadFields
) -> tuple[Documents, int]:
    """Turn rows of ids into documents.

    Args:
        batch: A `TokenTable`, or objects. Its `reject` is called for every row that does not fit.
        options: Names the columns.
        max_id: The largest id of the tokenizer.
        unread: Counts the fields of rows that no option reads.

    Returns:
        The documents, numbered as the batch numbers its records, and how many records were rejected.
    """
    values = batch.values
    table = values if isinstance(values, TokenTable) else table_of_records(values, options)
    for name, having in table.beside.items():
        unread.count(name, int(having.sum()))
        if unread.strict:
            table.faults |= dict.fromkeys(np.flatnonzero(having).tolist(), refusal([name])) | table.faults
    checks = _Checks(table, options, max_id)
    for row in sorted(checks.faults):
        batch.reject(int(batch.indices[row]), checks.faults[row])
    kept = np.ones(len(table), bool)
    kept[list(checks.faults)] = False
    ids = table.columns[options.ids_field]
    documents, parts = _boundaries(table, ids, checks.positions)
    rows = np.repeat(np.arange(len(table)), parts)
    lengths = documents[kept[rows]]
    parts_of = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
    tokens = np.repeat(kept, ids.lengths)
    whole = bool(kept.all())
    taken = lengths > 0
    several = bool((parts_of[kept[rows]][taken] > 0).any())
    mask, weights = checks.mask, checks.weights
    return (
        Documents(
            input_ids=_int32(ids.values if whole else ids.values[tokens]),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[taken])]),
            doc_ids=np.asarray(batch.indices, np.int64)[rows[kept[rows]][taken]],
            loss_mask=None if mask is None else (mask if whole else mask[tokens]),
            loss_weights=None if weights is None else (weights if whole else weights[tokens]),
            doc_parts=parts_of[kept[rows]][taken].astype(np.int32) if several else None,
        ),
        len(checks.faults),
    )


def with_eos(documents: Documents, eos_id: int) -> Documents:
    """Return documents that all end with EOS; one that had to be added is a target, unless the token before weighs 0.

    With EOS 2, documents [5, 6], [7, 2] give [5, 6, 2], [7, 2].
    """
    ends = documents.offsets[1:]
    lacking = documents.input_ids[ends - 1] != eos_id
    mask, weights = documents.loss_mask, documents.loss_weights
    if weights is not None:  # an added one weighs like the token before it
        weights = np.insert(weights, ends[lacking], weights[ends[lacking] - 1])
        mask = (weights > 0).astype(np.uint8)
    elif mask is not None:
        mask = np.insert(mask, ends[lacking], 1)
    return documents._replace(
        input_ids=np.insert(documents.input_ids, ends[lacking], eos_id),
        offsets=documents.offsets + np.concatenate([np.zeros(1, np.int64), np.cumsum(lacking)]),
        loss_mask=mask,
        loss_weights=weights,
    )


def _int32(values: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


def _boundaries(
    table: TokenTable, ids: Ragged, positions: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the length of every document of every row, and how many each row has; a faulty row may give anything."""
    if SEQ_LENGTHS in table.columns:
        told = table.columns[SEQ_LENGTHS]
        return told.values.astype(np.int64), told.lengths
    if CU_SEQLENS in table.columns:
        told = table.columns[CU_SEQLENS]
        inner = np.ones(len(told.values), bool)
        inner[told.offsets[:-1][told.lengths > 0]] = False
        steps = told.values.astype(np.int64)
        steps[1:] -= told.values[:-1]
        return steps[inner], np.maximum(told.lengths - 1, 0)
    starts = np.zeros(len(ids.values), bool)
    if SEQ_START_ID in table.columns:
        told = table.columns[SEQ_START_ID]
        inside = (told.values >= 0) & (told.values < np.repeat(ids.lengths, told.lengths))  # else it is another row's
        starts[(told.values + np.repeat(ids.offsets[:-1], told.lengths))[inside]] = True
    starts[ids.offsets[:-1][ids.lengths > 0]] = True
    if positions is not None:
        starts |= positions == 0
    places = np.flatnonzero(starts)
    rows = np.searchsorted(ids.offsets, places, side="right") - 1
    lengths: npt.NDArray[np.int64] = np.diff(np.append(places, len(ids.values)))
    return lengths, np.bincount(rows, minlength=len(table)).astype(np.int64)


class _Checks:
    """What is wrong with each row; the first fault of a row counts."""

    def __init__(self, table: TokenTable, options: RecordOptions, max_id: int) -> None:
        self.table, self.options, self.max_id = table, options, max_id
        self.faults = dict(table.faults)
        self.ids = table.columns[options.ids_field]
        self.mask: npt.NDArray[np.uint8] | None = None
        self.weights: npt.NDArray[np.float16] | None = None
        self.positions: npt.NDArray[np.int64] | None = None
        self._check_ids()
        self._check_targets()
        self._check_weights()
        self._check_attention()
        self._check_boundaries()

    def _blame(self, rows: npt.NDArray[np.integer], reason: Callable[[int], str]) -> None:
        for row in np.unique(rows).tolist():
            if row not in self.faults:
                self.faults[row] = reason(row)

    def _rows_of(self, column: Ragged, wrong: Rows) -> npt.NDArray[np.int64]:
        return np.searchsorted(column.offsets, np.flatnonzero(wrong), side="right") - 1

    def _check_ids(self) -> None:
        values = self.ids.values
        if len(values) and (int(values.min()) < 0 or int(values.max()) > self.max_id):
            wrong = (values < 0) | (values > self.max_id)

            def reason(row: int) -> str:
                found = self.ids.row(row)
                place = int(np.flatnonzero((found < 0) | (found > self.max_id))[0])
                return f"id {found[place]} at place {place}; expected 0 to {self.max_id}, as the tokenizer has them"

            self._blame(self._rows_of(self.ids, wrong), reason)

    def _same_length(self, name: str) -> bool:
        """Blame rows where a column has another length than the ids; tell whether the column can be looked at whole."""
        column = self.table.columns[name]
        unlike = column.lengths != self.ids.lengths
        self._blame(
            np.flatnonzero(unlike),
            lambda row: (
                f"field {name!r} holds {column.lengths[row]:,} values, {self.options.ids_field!r} "
                f"{self.ids.lengths[row]:,}; expected as many"
            ),
        )
        return not unlike.any()

    def _aligned(self, name: str) -> npt.NDArray[np.int64]:
        """Return a column value by value beside the ids; rows of another length are filled with zeros."""
        column = self.table.columns[name]
        if self._same_length(name):
            return column.values
        aligned = np.zeros(len(self.ids.values), np.int64)
        same = column.lengths == self.ids.lengths
        aligned[np.repeat(same, self.ids.lengths)] = column.values[np.repeat(same, column.lengths)]
        return aligned

    def _check_targets(self) -> None:
        if self.options.labels_field is not None:
            labels = self._aligned(self.options.labels_field)
            trained = labels != NO_TARGET
            self.mask = trained.astype(np.uint8)
            wrong = trained & (labels != self.ids.values)
            self._blame(self._rows_of(self.ids, wrong), self._label_reason)
        if self.options.mask_field is not None:
            mask = self._aligned(self.options.mask_field)
            name = self.options.mask_field
            self._blame(
                self._rows_of(self.ids, (mask != 0) & (mask != 1)),
                lambda row: f"field {name!r} holds {self._odd(name, row)}; expected 0 or 1",
            )
            if SEQ_START_ID in self.table.columns:
                mask = np.concatenate([np.zeros(1, mask.dtype), mask])[: len(mask)]
            self.mask = mask.astype(np.uint8) if self.mask is None else self.mask & mask.astype(np.uint8)

    def _check_weights(self) -> None:
        """Check the weights of a column of them, and let targets have none where they are 0."""
        if not self.options.weighted:
            return
        name = self.options.weights_field
        assert name is not None
        values = np.ones(len(self.ids.values))
        if name in self.table.columns:
            values = self._aligned(name).astype(np.float64)
            wrong = ~np.isfinite(values) | ((values != 0) & ((values < MIN_WEIGHT) | (values > MAX_WEIGHT)))
            self._blame(self._rows_of(self.ids, wrong), lambda row: self._weight_reason(name, row))
            values[wrong] = 0
        if self.mask is not None:
            values = values * self.mask
        self.weights = values.astype(np.float16)
        self.mask = (self.weights > 0).astype(np.uint8)

    def _weight_reason(self, name: str, row: int) -> str:
        for place, value in enumerate(self.table.columns[name].row(row).tolist()):
            try:
                check_weight(value, f"field {name!r}, weight {place},")
            except SourceError as error:
                return str(error)
        return f"field {name!r} holds no weights"

    def _odd(self, name: str, row: int) -> int:
        return int(next(value for value in self.table.columns[name].row(row) if value not in (0, 1)))

    def _label_reason(self, row: int) -> str:
        name = self.options.labels_field
        assert name is not None
        ids, labels = self.ids.row(row), self.table.columns[name].row(row)
        trained = np.flatnonzero(labels != NO_TARGET)
        ahead = trained[trained < len(ids) - 1]
        if len(ahead) and (labels[ahead] == ids[ahead + 1]).all():
            return (
                f"field {name!r} looks shifted by one; expected each label in the place of its id, as transformers "
                "takes them. Shift them back"
            )
        place = int(trained[np.flatnonzero(labels[trained] != ids[trained])[0]])
        return (
            f"field {name!r} holds {labels[place]} at place {place}, {self.options.ids_field!r} {ids[place]}; "
            f"expected the same id, or {NO_TARGET} where there is no target"
        )

    def _check_attention(self) -> None:
        if ATTENTION_MASK in self.table.columns and self.table.columns[ATTENTION_MASK].values.size:
            values = self._aligned(ATTENTION_MASK)
            self._blame(
                self._rows_of(self.ids, values == 0),
                lambda row: (
                    f"field {ATTENTION_MASK!r} holds 0: the row is padded; expected ids without padding. "
                    "Take the padding away"
                ),
            )

    def _check_boundaries(self) -> None:
        told = ((SEQ_LENGTHS, _bad_lengths), (CU_SEQLENS, _bad_offsets), (SEQ_START_ID, _bad_starts))
        for name, check in told:
            if name in self.table.columns:
                column = self.table.columns[name]
                for row, reason in check(column, self.ids.lengths):
                    self.faults.setdefault(row, f"field {name!r} {reason}")
                return
        if POSITION_IDS in self.table.columns:
            positions = self.positions = self._aligned(POSITION_IDS)
            follows = np.diff(positions.astype(np.int64), prepend=-1) == 1
            follows[self.ids.offsets[:-1][self.ids.lengths > 0]] = False
            self._blame(
                self._rows_of(self.ids, ~follows & (positions != 0)),
                lambda row: f"field {POSITION_IDS!r} neither goes on nor restarts at 0; expected 0, 1, 2, … each time",
            )


def _bad_lengths(column: Ragged, lengths: npt.NDArray[np.int64]) -> Iterator[tuple[int, str]]:
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(column.values.astype(np.int64))])
    sums = totals[column.offsets[1:]] - totals[column.offsets[:-1]]
    negative = np.zeros(len(lengths), bool)
    negative[np.searchsorted(column.offsets, np.flatnonzero(column.values < 0), side="right") - 1] = True
    for row in np.flatnonzero((sums != lengths) | negative).tolist():
        yield row, f"sums to {sums[row]:,}, the row holds {lengths[row]:,} ids; expected lengths that add up to it"


def _bad_offsets(column: Ragged, lengths: npt.NDArray[np.int64]) -> Iterator[tuple[int, str]]:
    for row, length in enumerate(lengths.tolist()):
        offsets = column.row(row)
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != length or (np.diff(offsets) < 0).any():
            yield row, f"is no rise from 0 to {length:,}, the number of ids; expected cumulative lengths"


def _bad_starts(column: Ragged, lengths: npt.NDArray[np.int64]) -> Iterator[tuple[int, str]]:
    for row, length in enumerate(lengths.tolist()):
        starts = column.row(row)
        if len(starts) == 0 or starts[0] != 0 or starts[-1] >= max(length, 1) or (np.diff(starts) <= 0).any():
            yield row, f"does not rise from 0 to below {length:,}, the number of ids; expected where documents begin"
