"""Documents into segments that fit a pack, by a policy with a name; cutting comes before packing.

Every policy is arithmetic on the array of document lengths: no loop over documents, no tokens touched. What a policy
gives up is the difference between documents and segments, which the caller counts. Add a policy as an entry of
`POLICIES`. Cutting where the running row is full ("wrapped") is what pretraining does; best-fit packing without it cuts
far fewer documents (Ding et al. 2024, arXiv 2404.10830).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shards.errors import PackError


class Segments(NamedTuple):
    """Pieces of documents, in corpus order; all of shape (num_segments,)."""

    document: np.ndarray
    "Index of the document; int64."
    start: np.ndarray
    "First token inside the document; int64."
    length: np.ndarray
    "Tokens; int32, each in [1, seq_len]."


def cut(
    lengths: np.ndarray,
    seq_len: int,
    policy: str,
    *,
    truncate_side: str = "right",
    turn_ends: np.ndarray | None = None,
    turn_offsets: np.ndarray | None = None,
) -> Segments:
    """Turn documents into segments of at most `seq_len` tokens.

    Documents of 2, 7 and 4 tokens with `seq_len` 5 give, as (document, start, length):

        split     (0, 0, 2) (1, 0, 5) (1, 5, 2) (2, 0, 4)
        truncate  (0, 0, 2) (1, 0, 5) (2, 0, 4)
        drop      (0, 0, 2) (2, 0, 4)
        wrapped   (0, 0, 2) (1, 0, 3) (1, 3, 4) (2, 0, 1) (2, 1, 3)

    Args:
        lengths: Tokens per document; int64, shape (num_documents,). An empty document gives no segment.
        seq_len: Capacity of a pack, in tokens.
        policy: A key of `POLICIES`, or "truncate-turns".
        truncate_side: The side that truncation cuts off, "right" or "left".
        turn_ends: For "truncate-turns", where each turn of a document ends inside it, rising; int64, flat.
        turn_offsets: Where each document's turns start in `turn_ends`, then the end; int64, (num_documents + 1,).

    Raises:
        PackError: The policy or side is unknown, or the policy is "error" and a document is longer than `seq_len`.
    """
    lengths = np.asarray(lengths, np.int64)
    if truncate_side not in ("right", "left"):
        raise PackError(f"truncate side: {truncate_side!r}; expected right or left.")
    if policy == "truncate-turns":
        if turn_ends is None or turn_offsets is None:
            raise PackError("truncate-turns: documents without turns; expected conversations. Choose another policy.")
        return _truncate_turns(lengths, seq_len, truncate_side == "left", turn_ends, turn_offsets)
    if policy not in POLICIES:
        raise PackError(f"overlong policy: {policy!r}; expected {', '.join(POLICIES)} or truncate-turns.")
    return POLICIES[policy](lengths, seq_len, truncate_side == "left")


def _one_segment_each(first: np.ndarray, stop: np.ndarray) -> Segments:
    """Return one segment per document, of its tokens in [first, stop), where there are any."""
    kept = np.flatnonzero(stop > first)
    return Segments(kept, first[kept], (stop - first)[kept].astype(np.int32))


def _split(lengths: np.ndarray, seq_len: int, left: bool) -> Segments:
    return _at_multiples(np.zeros_like(lengths), lengths, seq_len)


def _wrapped(lengths: np.ndarray, seq_len: int, left: bool) -> Segments:
    ends = np.cumsum(lengths)
    return _at_multiples(ends - lengths, lengths, seq_len)


def _at_multiples(begins: np.ndarray, lengths: np.ndarray, seq_len: int) -> Segments:
    """Cut documents that begin at `begins` on some axis wherever that axis reaches a multiple of `seq_len`.

    "wrapped" lays documents end to end: 4, 3 and 8 tokens with `seq_len` 5 cover 0-4, 4-7 and 7-15, so they are cut at
    5 and 10: (0, 0, 4), (1, 0, 1), (1, 1, 2), (2, 0, 3), (2, 3, 5). "split" begins each at 0.
    """
    ends = begins + lengths
    rows = np.where(lengths > 0, (ends - 1) // seq_len - begins // seq_len + 1, 0)
    document = np.repeat(np.arange(len(lengths)), rows)
    row = np.arange(len(document)) - np.repeat(np.cumsum(rows) - rows, rows) + (begins // seq_len)[document]
    first = np.maximum(begins[document], row * seq_len)
    stop = np.minimum(ends[document], (row + 1) * seq_len)
    return Segments(document, first - begins[document], (stop - first).astype(np.int32))


def _truncate(lengths: np.ndarray, seq_len: int, left: bool) -> Segments:
    kept = np.minimum(lengths, seq_len)
    return _one_segment_each(lengths - kept, lengths) if left else _one_segment_each(np.zeros_like(lengths), kept)


def _drop(lengths: np.ndarray, seq_len: int, left: bool) -> Segments:
    return _one_segment_each(np.zeros_like(lengths), np.where(lengths <= seq_len, lengths, 0))


def _error(lengths: np.ndarray, seq_len: int, left: bool) -> Segments:
    longer = np.flatnonzero(lengths > seq_len)
    if len(longer):
        raise PackError(
            f"document {longer[0]}: {lengths[longer[0]]} tokens; expected at most seq_len, {seq_len} "
            f"({len(longer)} documents are longer). Raise seq_len or choose another overlong policy."
        )
    return _one_segment_each(np.zeros_like(lengths), lengths)


def _truncate_turns(
    lengths: np.ndarray, seq_len: int, left: bool, turn_ends: np.ndarray, turn_offsets: np.ndarray
) -> Segments:
    """Keep the first whole turns that fit (or the last); a document of which no turn fits gives no segment.

    For cutting off the left side, the turns given are exchanges, so that what is kept begins with a user's message.
    """
    turn_ends, turn_offsets = np.asarray(turn_ends, np.int64), np.asarray(turn_offsets, np.int64)
    document = np.repeat(np.arange(len(lengths)), np.diff(turn_offsets))
    # Cutting off the left side at the end of a turn keeps what follows it: of turns, all but the first ones.
    fits = lengths[document] - turn_ends <= seq_len if left else turn_ends <= seq_len
    num_fits = np.diff(np.concatenate(([0], np.cumsum(fits)))[turn_offsets])
    pick = turn_offsets[1:] - num_fits if left else turn_offsets[:-1] + num_fits - 1
    some = num_fits > (1 if left else 0)  # left: the last turn's own end leaves nothing of it
    at = np.where(some, np.concatenate((turn_ends, [0]))[np.where(some, pick, len(turn_ends))], 0)
    long = lengths > seq_len
    if left:
        return _one_segment_each(np.where(long, np.where(some, at, lengths), 0), lengths)
    return _one_segment_each(np.zeros_like(lengths), np.where(long, at, lengths))


POLICIES: dict[str, Callable[[np.ndarray, int, bool], Segments]] = {
    "split": _split,
    "truncate": _truncate,
    "drop": _drop,
    "error": _error,
    "wrapped": _wrapped,
}
