"""The rules of rows (F7 to F13), for a whole record batch in a few numpy passes.

Used when a batch is first read and by `verify`, so that what one accepts the other does. A batch whose boundaries are
wrong is not looked at further: everything else is counted along them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shards.cost import attention_pairs, cost_class, padded_length
from shards.schema import SEGMENT_COLUMNS, Layout
from shards.shard import ArrowBatch

MIN_WEIGHT = np.float16(2.0**-14)  # below, float16 loses digits
MAX_PROBLEMS = 20  # rows of a batch that are named for one rule


class RowProblem(NamedTuple):
    """A rule that a row breaks."""

    row: int
    "Row in the batch."
    rule: str
    what: str


class Segments(NamedTuple):
    """Where the segments of a batch lie."""

    row: np.ndarray
    "int64 (num_segments,): row of each."
    start: np.ndarray
    "int64 (num_segments,): first token, counted in the batch."
    length: np.ndarray
    "int64 (num_segments,): tokens, padding included."
    real: np.ndarray
    "int64 (num_segments,): tokens without padding."


def check_rows(
    batch: ArrowBatch,
    layout: Layout,
    window: int,
    token_limit: int,
    index: dict[str, np.ndarray] | None = None,
) -> list[RowProblem]:
    """Check the rows of a batch.

    Args:
        batch: A validated batch with the columns of `layout`.
        layout: What the plan fixes.
        window: The window that the shard belongs to.
        token_limit: Token ids are below this.
        index: The rows' entries of `index.arrow`, by column; None leaves rule F13 out.
    """
    if not batch.num_rows:
        return []
    problems = list(_boundary_problems(batch, layout))
    if problems:
        return problems
    segments = segments_of(batch)
    problems += _alignment_problems(segments, layout)
    problems += _token_problems(batch, segments, layout, token_limit)
    problems += _segment_problems(batch, segments, window)
    figures = figures_of(batch, segments, layout)
    for name in (name for name in batch.rows if name in figures):
        problems += _differences(batch.rows[name], figures[name], "F10", name)
    for name, values in (index or {}).items():
        problems += _differences(values, figures[name], "F13", f"{name} of index.arrow")
    return problems


def segments_of(batch: ArrowBatch) -> Segments:
    """Return where the segments of a batch lie; its boundaries must be right."""
    cu, cu_offsets = batch.lists["cu_seqlens"]
    token_offsets = batch.lists["input_ids"][1].astype(np.int64)
    row = np.repeat(np.arange(batch.num_rows), np.diff(cu_offsets) - 1)
    leading = np.ones(len(cu), bool)
    leading[cu_offsets[1:] - 1] = False  # the last entry of a row starts no segment
    following = np.ones(len(cu), bool)
    following[cu_offsets[:-1]] = False
    start = cu[leading].astype(np.int64)
    length = cu[following].astype(np.int64) - start
    real = batch.lists["segment_lens"][0].astype(np.int64) if "segment_lens" in batch.lists else length
    return Segments(row, start + token_offsets[row], length, real)


def figures_of(batch: ArrowBatch, segments: Segments, layout: Layout) -> dict[str, np.ndarray]:
    """Count what the columns of one number per row, and the index, say of each row."""
    first = np.searchsorted(segments.row, np.arange(batch.num_rows))  # first segment of each row
    if "loss_mask" in batch.lists:
        values, _ = batch.lists["loss_mask"]
        targets = np.add.reduceat(values, segments.start, dtype=np.int64)
    else:
        targets = segments.length - 1
    longest = np.maximum.reduceat(segments.length, first)
    pairs = np.add.reduceat(attention_pairs(segments.length), first)
    figures = {
        "num_tokens": np.add.reduceat(segments.real, first),
        "num_segments": np.bincount(segments.row, minlength=batch.num_rows),
        "num_targets": np.add.reduceat(targets, first),
        "num_target_segments": np.add.reduceat((targets > 0).astype(np.int64), first),
        "max_seqlen": longest,
        "attention_pairs": pairs,
        "cost_class": cost_class(pairs),
        "padded_length": padded_length(longest, layout.seq_len),
    }
    if "loss_weights" in batch.lists:
        values, offsets = batch.lists["loss_weights"]
        figures["weight_sum"] = np.add.reduceat(values.astype(np.float64), offsets[:-1])
    return figures


def _boundary_problems(batch: ArrowBatch, layout: Layout) -> Iterator[RowProblem]:
    """F7 and F12: what everything else is counted along."""
    lengths = np.diff(batch.lists["input_ids"][1])
    yield from _each(
        (lengths < 1) | (lengths > layout.seq_len), "F7", lambda row: f"holds {lengths[row]} tokens; expected 1 to "
        f"{layout.seq_len}",
    )  # fmt: skip
    cu, offsets = batch.lists["cu_seqlens"]
    counts = np.diff(offsets)
    wrong = counts < 2
    if len(cu):
        first, last = np.minimum(offsets[:-1], len(cu) - 1), np.maximum(offsets[1:] - 1, 0)
        wrong |= (cu[first] != 0) | (cu[last] != lengths)
        falls = np.diff(cu) <= 0
        row_of = np.repeat(np.arange(batch.num_rows), counts)[1:]
        falls[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(cu))] - 1] = False  # between rows
        wrong[row_of[falls]] = True
    yield from _each(
        wrong, "F7", lambda row: f"cu_seqlens ends at {cu[offsets[row + 1] - 1] if counts[row] else None} for "
        f"{lengths[row]} tokens, or does not rise from 0",
    )  # fmt: skip
    for name in SEGMENT_COLUMNS:
        if name in batch.lists:
            there = np.diff(batch.lists[name][1])
            yield from _each(
                (there != counts - 1) & ~wrong, "F12", lambda row, name=name, there=there: f"{name} has {there[row]} "
                f"entries for {counts[row] - 1} segments",
            )  # fmt: skip


def _alignment_problems(segments: Segments, layout: Layout) -> Iterator[RowProblem]:
    if layout.align == 1:
        return
    padding = segments.length - segments.real
    wrong = (segments.length % layout.align != 0) | (segments.real < 1) | (padding < 0) | (padding >= layout.align)
    yield from _segments(
        wrong, segments, "F7", lambda k: f"a segment of {segments.length[k]} tokens has the real length "
        f"{segments.real[k]}; expected it padded to a multiple of {layout.align}",
    )  # fmt: skip


def _token_problems(batch: ArrowBatch, segments: Segments, layout: Layout, token_limit: int) -> Iterator[RowProblem]:
    ids, offsets = batch.lists["input_ids"]
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= token_limit:
        wrong = (ids < 0) | (ids >= token_limit)
        yield from _tokens(
            wrong, offsets, "F11", lambda k, row: f"token {k - offsets[row]} (document "
            f"{_document(batch, segments, k)}) is id {int(ids[k])}; expected 0 to {token_limit - 1}",
        )  # fmt: skip
    place = np.arange(len(ids), dtype=np.int32) - np.repeat(segments.start, segments.length).astype(np.int32)
    if "position_ids" in batch.lists:
        wrong = batch.lists["position_ids"][0] != place
        if wrong.any():
            yield from _rows_of(wrong, offsets, "F8", "position_ids do not restart at 0 in every segment")
    real = place < np.repeat(segments.real, segments.length) if layout.align > 1 else None
    if "loss_mask" in batch.lists:
        mask = batch.lists["loss_mask"][0]
        wrong = mask > 1
        wrong[segments.start] |= mask[segments.start] > 0
        if real is not None:
            wrong |= (mask > 0) & ~real
        if wrong.any():
            what = "loss_mask is not 0 or 1 for every token, or has a target at a segment start or in padding"
            yield from _rows_of(wrong, offsets, "F9", what)
    if "loss_weights" in batch.lists:
        weights, mask = batch.lists["loss_weights"][0], batch.lists["loss_mask"][0]
        wrong = ((weights > 0) != (mask > 0)) | ~_storable(weights)
        if wrong.any():
            yield from _rows_of(
                wrong, offsets, "F9", "loss_weights are not 2^-14 to 65,504 at the targets and 0 elsewhere"
            )


def _storable(weights: np.ndarray) -> np.ndarray:
    """Say for each weight whether it is 0, or from 2^-14 to the largest finite float16."""
    fits: np.ndarray = np.isfinite(weights) & ((weights == 0) | (weights >= MIN_WEIGHT))
    return fits


def _segment_problems(batch: ArrowBatch, segments: Segments, window: int) -> Iterator[RowProblem]:
    ids, parts, starts = (batch.lists[name][0] for name in ("doc_ids", "doc_parts", "doc_offsets"))
    yield from _segments(
        (ids >> 32 != window) | (starts < 0) | (parts < 0), segments, "F12",
        lambda k: f"names document {ids[k]}, part {parts[k]}, from token {starts[k]}; expected one of window {window}",
    )  # fmt: skip
    hidden = batch.lists["start_targets"][0]
    if "start_weights" in batch.lists:
        weights = batch.lists["start_weights"][0]
        yield from _segments(
            ((weights > 0) != (hidden > 0)) | ~_storable(weights), segments, "F12",
            lambda k: f"start_weights is {weights[k]} where start_targets is {hidden[k]}",
        )  # fmt: skip
    yield from _segments(
        (hidden > 1) | ((hidden > 0) & (starts == 0)), segments, "F12",
        lambda k: f"start_targets is {hidden[k]} where the document begins at token {starts[k]} of a segment",
    )  # fmt: skip
    if "turn_ends" in batch.lists:
        ends, offsets = batch.lists["turn_ends"]
        lengths = np.diff(batch.lists["input_ids"][1])
        row = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
        before = np.concatenate([[0], ends[:-1]])
        before[offsets[:-1][np.diff(offsets) > 0]] = 0
        wrong = (ends <= before) | (ends > lengths[row])
        if wrong.any():
            what = "turn_ends do not rise strictly from 1 to the row's length"
            yield from (RowProblem(int(k), "F12", what) for k in np.unique(row[wrong])[:MAX_PROBLEMS])


def _differences(found: np.ndarray, counted: np.ndarray, rule: str, name: str) -> Iterator[RowProblem]:
    same = np.isclose(found, counted, rtol=1e-9, atol=0) if found.dtype.kind == "f" else found == counted
    yield from _each(~same, rule, lambda row: f"{name} is {found[row]}; counted {counted[row]}")


def _each(wrong: np.ndarray, rule: str, what: Any) -> Iterator[RowProblem]:
    return (RowProblem(int(row), rule, what(int(row))) for row in np.flatnonzero(wrong)[:MAX_PROBLEMS])


def _segments(wrong: np.ndarray, segments: Segments, rule: str, what: Any) -> Iterator[RowProblem]:
    return (RowProblem(int(segments.row[k]), rule, what(int(k))) for k in np.flatnonzero(wrong)[:MAX_PROBLEMS])


def _tokens(wrong: np.ndarray, offsets: np.ndarray, rule: str, what: Any) -> Iterator[RowProblem]:
    """Name the first wrong token of each row."""
    places = np.flatnonzero(wrong)
    rows, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
    for row, k in list(zip(rows.tolist(), places[first].tolist(), strict=True))[:MAX_PROBLEMS]:
        yield RowProblem(row, rule, what(k, row))


def _rows_of(wrong: np.ndarray, offsets: np.ndarray, rule: str, what: str) -> Iterator[RowProblem]:
    return _tokens(wrong, offsets, rule, lambda *_: what)


def _document(batch: ArrowBatch, segments: Segments, token: int) -> int:
    return int(batch.lists["doc_ids"][0][np.searchsorted(segments.start, token, side="right") - 1])
