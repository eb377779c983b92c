"""Copy the tokens of one window from document order into pack order, in one pass over memory.

Input: the window's documents, flat; the segments cut from them; the bins. Output: `shards.writer.PackedRows`. Ids,
positions, mask, boundaries and every per-row figure are written while a segment's tokens are in cache. Compiled by
numba, about 5 ns a token; a mask is always made, so plain text and conversations take the same path, and the layout
decides what of it is stored.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.packing.cutting import Segments
from pipeline.packing.kernels import kernel
from pipeline.packing.packers import Bins
from pipeline.tokens import Documents
from shards.errors import PackError
from shards.schema import Layout
from shards.writer import PackedRows


def assemble_rows(documents: Documents, segments: Segments, bins: Bins, layout: Layout) -> PackedRows:
    """Return the packs of a window.

    Args:
        documents: Tokens in document order.
        segments: Pieces of documents, each at most `layout.seq_len` tokens.
        bins: Which segments share a pack.
        layout: Column types.

    Raises:
        PackError: A token id or an offset is beyond its column's type, which would store another number.
    """
    largest, farthest = int(documents.input_ids.max(initial=0)), int(segments.start.max(initial=0))
    if largest > layout.max_token_id or farthest > np.iinfo(np.int32).max:
        raise PackError(
            f"token id {largest:,}, {farthest:,} tokens into a document; expected ids up to the tokenizer's largest, "
            f"{layout.max_token_id:,}, and less than 2^31 tokens. Look for a damaged tokenizer or record."
        )
    order = bins.order
    document, start = segments.document[order], segments.start[order].astype(np.int64)
    lengths = segments.length[order].astype(np.int64)
    slots = align_up(lengths, layout.align)
    segment_offsets = bins.offsets.astype(np.int64)
    token_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(slots)])
    num_tokens, num_rows = int(token_ends[-1]), len(segment_offsets) - 1
    starts = documents.offsets[document] + start
    parts = np.zeros(len(documents.doc_ids), np.int32) if documents.doc_parts is None else documents.doc_parts
    trained = np.ones(len(starts), np.uint8) if documents.loss_mask is None else documents.loss_mask[starts]
    turn_ends, turn_offsets = _turn_ends(documents, starts, lengths, token_ends, segment_offsets)
    rows = PackedRows(
        token_offsets=token_ends[segment_offsets],
        segment_offsets=segment_offsets,
        input_ids=np.empty(num_tokens, layout.token_type.to_pandas_dtype()),
        position_ids=np.empty(num_tokens if layout.position_ids else 0, layout.position_type.to_pandas_dtype()),
        loss_mask=np.empty(num_tokens, np.uint8),
        loss_weights=np.zeros(num_tokens, np.float16) if layout.loss_weights else None,
        cu_seqlens=np.empty(len(order) + num_rows, np.int32),
        doc_ids=documents.doc_ids[document],
        doc_parts=parts[document],
        doc_offsets=start.astype(np.int32),
        start_targets=np.where(start > 0, trained, 0).astype(np.uint8),
        turn_ends=turn_ends,
        turn_offsets=turn_offsets,
        segment_lens=lengths.astype(np.int32),
        num_tokens=np.add.reduceat(lengths, segment_offsets[:-1]).astype(np.int32) if num_rows else _no_rows(),
        max_seqlen=np.empty(num_rows, np.int32),
        num_targets=np.empty(num_rows, np.int32),
        num_target_segments=np.empty(num_rows, np.int32),
        attention_pairs=np.empty(num_rows, np.int64),
    )
    _fill(
        documents.input_ids,
        mask_or_empty(documents),
        starts,
        lengths,
        slots,
        np.arange(slots.max(initial=0)).astype(layout.position_type.to_pandas_dtype()),
        segment_offsets,
        rows.input_ids,
        rows.position_ids,
        rows.loss_mask,
        rows.cu_seqlens,
        rows.max_seqlen,
        rows.num_targets,
        rows.num_target_segments,
        rows.attention_pairs,
    )
    return _weighted(rows, documents, starts, lengths, token_ends) if layout.loss_weights else rows


def align_up(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Round lengths in tokens up to a multiple; same shape and type."""
    return lengths if multiple == 1 else -(-lengths // multiple) * multiple


def _no_rows() -> np.ndarray:
    return np.empty(0, np.int32)


def _turn_ends(
    documents: Documents, starts: np.ndarray, lengths: np.ndarray, token_ends: np.ndarray, segment_offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return where turns end in each row, and where each row's turns start among them.

    A document of 10 tokens with turns that end at 4 and 10, cut into tokens 0 to 6 and 6 to 10: the first segment has
    an end at 4, the second at 4, since the token before place 10 of the document is its last.
    """
    if documents.turn_ends is None or documents.turn_offsets is None:
        return np.empty(0, np.int32), np.zeros(len(segment_offsets), np.int64)
    ends = np.repeat(documents.offsets[:-1], np.diff(documents.turn_offsets)) + documents.turn_ends
    first, stop = np.searchsorted(ends, starts, side="right"), np.searchsorted(ends, starts + lengths, side="right")
    counts = stop - first
    turn_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    chosen = np.arange(turn_starts[-1]) - np.repeat(turn_starts[:-1] - first, counts)
    row_starts = np.repeat(token_ends[segment_offsets[:-1]], np.diff(segment_offsets))
    places = ends[chosen] + np.repeat(token_ends[:-1] - row_starts - starts, counts)
    return places.astype(np.int32), turn_starts[segment_offsets]


def _weighted(
    rows: PackedRows, documents: Documents, starts: np.ndarray, lengths: np.ndarray, token_ends: np.ndarray
) -> PackedRows:
    """Fill in the weights of a window's rows; a token that is no target weighs nothing."""
    assert rows.loss_weights is not None
    assert rows.loss_mask is not None
    place = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source, target = np.repeat(starts, lengths) + place, np.repeat(token_ends[:-1], lengths) + place
    rows.loss_weights[target] = 1.0 if documents.loss_weights is None else documents.loss_weights[source]
    hidden = np.where(rows.start_targets > 0, rows.loss_weights[token_ends[:-1]], 0).astype(np.float16)
    rows.loss_weights[rows.loss_mask == 0] = 0.0
    weights = rows.loss_weights.astype(np.float64)
    sums = np.add.reduceat(weights, rows.token_offsets[:-1]) if len(rows) else np.empty(0)
    return replace(rows, weight_sum=sums, start_weights=hidden)


def mask_or_empty(documents: Documents) -> npt.NDArray[np.uint8]:
    """Return the loss mask as compiled code takes it, which knows no None: empty where every token may be a target."""
    return np.empty(0, np.uint8) if documents.loss_mask is None else documents.loss_mask


@kernel(lambda ids, mask, starts, *_: 30 * len(starts) + len(ids) // 100)
def _fill(
    ids: Any,
    mask: Any,
    starts: Any,
    lengths: Any,
    slots: Any,
    positions: Any,
    segment_offsets: Any,
    out_ids: Any,
    out_positions: Any,
    out_mask: Any,
    cu_seqlens: Any,
    max_seqlen: Any,
    num_targets: Any,
    num_target_segments: Any,
    attention_pairs: Any,
) -> None:
    token = 0
    boundary = 0
    for row in range(len(segment_offsets) - 1):
        row_start = token
        longest = targets = target_segments = pairs = 0
        cu_seqlens[boundary] = 0
        boundary += 1
        for segment in range(segment_offsets[row], segment_offsets[row + 1]):
            start, length, slot = starts[segment], lengths[segment], slots[segment]
            out_ids[token : token + length] = ids[start : start + length]
            out_ids[token + length : token + slot] = 0
            out_mask[token + length : token + slot] = 0
            if len(out_positions):
                out_positions[token : token + slot] = positions[:slot]
            here = length - 1
            if len(mask):
                out_mask[token : token + length] = mask[start : start + length]
                here = np.int64(mask[start + 1 : start + length].sum())
            else:
                out_mask[token + 1 : token + length] = 1
            out_mask[token] = 0  # nothing precedes the first token, so it cannot be predicted
            token += slot
            longest = max(longest, slot)
            targets += here
            target_segments += here > 0
            pairs += slot * (slot + 1) // 2
            cu_seqlens[boundary] = token - row_start
            boundary += 1
        max_seqlen[row], num_targets[row], num_target_segments[row] = longest, targets, target_segments
        attention_pairs[row] = pairs


@kernel(lambda mask, starts, lengths: (20 if len(mask) else 4) * len(lengths) + len(mask) // 100)
def count_targets(mask: Any, starts: Any, lengths: Any) -> Any:
    """Count targets of each piece of text: masked tokens, its first one excepted.

    Args:
        mask: uint8 (num_tokens,), or empty where every token may be a target.
        starts: int64 (num_pieces,), place of the first token of each.
        lengths: int64 (num_pieces,), tokens.

    Returns:
        int64 (num_pieces,).
    """
    counts = np.empty(len(starts), np.int64)
    for piece in range(len(starts)):
        if len(mask):
            counts[piece] = mask[starts[piece] + 1 : starts[piece] + lengths[piece]].sum()
        else:
            counts[piece] = max(lengths[piece] - 1, 0)
    return counts
