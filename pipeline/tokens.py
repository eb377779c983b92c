"""Documents as flat arrays: what the documents room makes, and what cutting, packing and checking take.

One container for a batch of records and for a whole window. Tokens of all documents lie end to end; everything else is
an offset into them or one number per document. An absent array stands for its plain case, so that plain text carries
ids and offsets alone, and batches with and without it can be joined.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Documents(NamedTuple):
    """Tokenized documents, flat."""

    input_ids: npt.NDArray[np.int32]
    "int32 (num_tokens,)"
    offsets: npt.NDArray[np.int64]
    "int64 (num_documents + 1,): where each document begins, then the number of tokens."
    doc_ids: npt.NDArray[np.int64]
    "int64 (num_documents,): index of each document's record, in a window plus the window's number times 2^32."
    loss_mask: npt.NDArray[np.uint8] | None = None
    """uint8 (num_tokens,): 1 where a token is to be trained; None where all are. Nothing precedes the first token of a
    segment, so whatever stands there, it is no target: `pipeline.packing.rows` alone sees to that."""
    loss_weights: npt.NDArray[np.float16] | None = None
    "float16 (num_tokens,): the weight of each token, above 0 exactly where `loss_mask` is 1; None where all weigh 1."
    doc_parts: npt.NDArray[np.int32] | None = None
    "int32 (num_documents,): which of the documents of one record, from 0; None where no record gives two."
    turn_ends: npt.NDArray[np.int32] | None = None
    "int32, flat: where turns end, in tokens from the document's beginning; the last is its length. None if not asked."
    turn_offsets: npt.NDArray[np.int64] | None = None
    "int64 (num_documents + 1,): where each document's turns begin in `turn_ends`."

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens per document; int64 (num_documents,)."""
        return np.diff(self.offsets)

    def mask_of(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the mask of the tokens in [start, stop); uint8."""
        return np.ones(stop - start, np.uint8) if self.loss_mask is None else self.loss_mask[start:stop]

    def take(self, chosen: npt.NDArray[np.bool_]) -> "Documents":
        """Return some of the documents, in their order.

        Args:
            chosen: bool (num_documents,).
        """
        lengths = self.lengths
        tokens = np.repeat(chosen, lengths)
        turns = counts = None
        if self.turn_ends is not None and self.turn_offsets is not None:
            counts = np.diff(self.turn_offsets)
            turns = self.turn_ends[np.repeat(chosen, counts)]
        return Documents(
            input_ids=self.input_ids[tokens],
            offsets=_running_sum([lengths[chosen]]),
            doc_ids=self.doc_ids[chosen],
            loss_mask=None if self.loss_mask is None else self.loss_mask[tokens],
            loss_weights=None if self.loss_weights is None else self.loss_weights[tokens],
            doc_parts=None if self.doc_parts is None else self.doc_parts[chosen],
            turn_ends=turns,
            turn_offsets=None if counts is None else _running_sum([counts[chosen]]),
        )


def concatenate(parts: Sequence[Documents], window: int = 0) -> Documents:
    """Join batches into the documents of a window.

    Args:
        parts: Batches, in reading order. Where any has a mask, weights or parts, the others get those of their plain
            case; turn ends are kept only where every batch has them.
        window: Number of the window, which goes into `doc_ids`.

    Example:
        Lengths [3, 2] and [4] with masks None and [0, 1, 1, 0] give offsets [0, 3, 5, 9] and the mask
        [1, 1, 1, 1, 1, 0, 1, 1, 0].
    """
    turns = [(part.turn_ends, np.diff(part.turn_offsets)) for part in parts if part.turn_offsets is not None]
    with_turns = 0 < len(turns) == len(parts)
    return Documents(
        input_ids=_joined([part.input_ids for part in parts], np.int32),
        offsets=_running_sum([part.lengths for part in parts]),
        doc_ids=_joined([part.doc_ids for part in parts], np.int64) + (window << 32),
        loss_mask=_filled(
            [part.loss_mask for part in parts],
            [partial(np.ones, len(part.input_ids), np.uint8) for part in parts],
            np.uint8,
        ),
        loss_weights=_filled(
            [part.loss_weights for part in parts],
            [partial(part.mask_of, 0, len(part.input_ids)) for part in parts],
            np.float16,
        ),
        doc_parts=_filled(
            [part.doc_parts for part in parts],
            [partial(np.zeros, len(part.doc_ids), np.int32) for part in parts],
            np.int32,
        ),
        turn_ends=_joined([ends for ends, _ in turns], np.int32) if with_turns else None,
        turn_offsets=_running_sum([numbers for _, numbers in turns]) if with_turns else None,
    )


def _joined(arrays: Sequence[Any], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])


def _filled(
    arrays: Sequence[Any], plain: Sequence[Callable[[], npt.NDArray[Any]]], dtype: Any
) -> npt.NDArray[Any] | None:
    """Join arrays, what `plain` makes standing for those that are absent; None where all are."""
    if all(array is None for array in arrays):
        return None
    pairs = zip(arrays, plain, strict=True)
    return _joined([make().astype(dtype, copy=False) if array is None else array for array, make in pairs], dtype)


def _running_sum(lengths: Sequence[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(_joined(lengths, np.int64))])
