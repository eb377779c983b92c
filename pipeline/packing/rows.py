"""Copy the tokens of one window from document order into pack order, in one pass over memory.

Input: the window's documents, flat; the segments cut from them; the bins. Output: `shards.writer.PackedRows`. Ids,
positions, mask, boundaries and every per-row figure are written while a segment's tokens are in cache. Compiled by
numba, about 5 ns a token; a mask is always stored, so plain text and conversations take the same path.
"""

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
    lengths = segments.length[order].astype(np.int64)
    segment_offsets = bins.offsets.astype(np.int64)
    token_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    num_tokens, num_rows = int(token_ends[-1]), len(segment_offsets) - 1
    document = segments.document[order]
    rows = PackedRows(
        token_offsets=token_ends[segment_offsets],
        segment_offsets=segment_offsets,
        input_ids=np.empty(num_tokens, layout.token_type.to_pandas_dtype()),
        position_ids=np.empty(num_tokens if layout.position_ids else 0, layout.position_type.to_pandas_dtype()),
        loss_mask=np.empty(num_tokens, np.uint8),
        cu_seqlens=np.empty(len(order) + num_rows, np.int32),
        doc_ids=documents.doc_ids[document],
        doc_offsets=segments.start[order].astype(np.int32),
        max_seqlen=np.empty(num_rows, np.int32),
        num_targets=np.empty(num_rows, np.int32),
        num_target_segments=np.empty(num_rows, np.int32),
        attention_pairs=np.empty(num_rows, np.int64),
    )
    starts = documents.offsets[document] + segments.start[order]
    _fill(
        documents.input_ids,
        mask_or_empty(documents),
        starts,
        lengths,
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
    return rows


def mask_or_empty(documents: Documents) -> npt.NDArray[np.uint8]:
    """Return the loss mask as compiled code takes it, which knows no None: empty where every token may be a target."""
    return np.empty(0, np.uint8) if documents.loss_mask is None else documents.loss_mask


@kernel(lambda ids, mask, starts, lengths, *_: 10 * len(lengths) + (5 if len(mask) else 2) * int(lengths.sum()))
def _fill(
    ids: Any,
    mask: Any,
    starts: Any,
    lengths: Any,
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
            start, length = starts[segment], lengths[segment]
            out_ids[token : token + length] = ids[start : start + length]
            if len(out_positions):
                for position in range(length):
                    out_positions[token + position] = position
            here = 0
            if len(mask):
                for position in range(1, length):
                    out_mask[token + position] = mask[start + position]
                    here += mask[start + position]
            else:
                out_mask[token + 1 : token + length] = 1
                here = length - 1
            out_mask[token] = 0  # nothing precedes the first token, so it cannot be predicted
            token += length
            longest = max(longest, length)
            targets += here
            target_segments += here > 0
            pairs += length * (length + 1) // 2
            cu_seqlens[boundary] = token - row_start
            boundary += 1
        max_seqlen[row], num_targets[row], num_target_segments[row] = longest, targets, target_segments
        attention_pairs[row] = pairs


@kernel(lambda mask, starts, lengths: 4 * len(lengths) + (2 * int(lengths.sum()) if len(mask) else 0))
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
            total = 0
            for token in range(starts[piece] + 1, starts[piece] + lengths[piece]):
                total += mask[token]
            counts[piece] = total
        else:
            counts[piece] = max(lengths[piece] - 1, 0)
    return counts
