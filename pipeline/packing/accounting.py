"""Cut the documents of a window into segments, and count every document, token and target that is lost on the way.

In: flat documents, the options of their source, the packer. Out: segments, and the counts of documents, tokens and
targets that a sidecar records; what was read is what is packed plus what is lost, by reason.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.config import RecordOptions
from pipeline.packing.cutting import Segments, cut
from pipeline.packing.rows import count_targets, mask_or_empty
from pipeline.tokens import Documents
from shards.counts import DocumentCounts, TokenCounts


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What became of the documents of a window."""

    documents: DocumentCounts
    """read; packed, and of these, split (into several segments) and truncated; dropped as a whole, by reason: overlong,
    no_target. Reasons that count nothing are left out."""
    tokens: TokenCounts
    "read, packed, and lost by reason: overlong, no_target, truncated."
    targets: TokenCounts
    "read, packed, and lost by reason: these three, and boundary (first tokens of a segment inside a document)."


def cut_documents(
    documents: Documents, options: RecordOptions, seq_len: int, cut_policy: str | None = None
) -> tuple[Segments, Balance]:
    """Cut documents into segments.

    A document leaves as a whole when it has no target (before or after cutting) or when the policy gives it no segment;
    one that stays may lose its far end, and the targets that became first tokens of a segment. With `seq_len` 4, the
    policy "split" and documents with the masks 111111, 000 and 10000 the segments are (0, 0, 4) and (0, 4, 2), and

        lost tokens: no_target 3 + 5 (a document's first token is never a target, so the third has none either)
        lost targets: boundary 1 (token 4 of the first document begins a segment: nothing there predicts it)

    Args:
        documents: All documents of the window.
        options: How the records of their source are cut, and whether documents without targets stay.
        seq_len: Capacity of a pack, in tokens.
        cut_policy: The packer's own policy, see `Packer.cut_policy`; None for that of the options.

    Raises:
        PackError: The policy refuses a document, or does not fit the documents.
    """
    policy = cut_policy or options.overlong_policy
    lengths, begins, mask = documents.lengths, documents.offsets[:-1], mask_or_empty(documents)
    targets = count_targets(mask, begins, lengths)
    wanted = (targets > 0) | options.keep_no_target
    chosen = np.flatnonzero(wanted)
    turns = _turns(documents, chosen) if policy == "truncate-turns" else {}
    pieces = cut(lengths[chosen], seq_len, policy, truncate_side=options.truncate_side, **turns)
    segments = Segments(chosen[pieces.document], pieces.start, pieces.length)

    segment_targets = count_targets(mask, begins[segments.document] + segments.start, segments.length.astype(np.int64))
    kept_targets = np.bincount(segments.document, segment_targets, len(lengths)).astype(np.int64)
    num_segments = np.bincount(segments.document, minlength=len(lengths))
    stays = (num_segments > 0) & ((kept_targets > 0) | options.keep_no_target | (cut_policy is not None))
    if not stays[segments.document].all():
        keep = stays[segments.document]
        segments, segment_targets = Segments(*(column[keep] for column in segments)), segment_targets[keep]
    targets_packed = int(segment_targets.sum())
    overlong = wanted & (num_segments == 0)
    return segments, _balance(documents, segments, targets, targets_packed, overlong, ~stays & ~overlong)


def _balance(
    documents: Documents,
    segments: Segments,
    targets: np.ndarray,
    targets_packed: int,
    overlong: np.ndarray,
    no_target: np.ndarray,
) -> Balance:
    """Draw the balance of a window.

    Args:
        documents: All documents.
        segments: The segments that are packed.
        targets: Targets that each document had; int64, shape (num_documents,).
        targets_packed: Targets of all segments.
        overlong: Whether the policy left a document out; bool, shape (num_documents,).
        no_target: Whether a document left for want of a target; bool, shape (num_documents,).
    """
    lengths = documents.lengths
    kept = np.bincount(segments.document, segments.length, len(lengths)).astype(np.int64)
    num_segments = np.bincount(segments.document, minlength=len(lengths))
    truncated = (num_segments > 0) & (kept < lengths)
    dropped = {"overlong": overlong, "no_target": no_target}
    lost = {reason: int(targets[which].sum()) for reason, which in dropped.items()}
    lost["boundary"] = _boundary_targets(documents, segments)
    lost["truncated"] = int(targets.sum()) - targets_packed - sum(lost.values())
    lost_tokens = {reason: int(lengths[which].sum()) for reason, which in dropped.items()}
    lost_tokens["truncated"] = int((lengths - kept)[truncated].sum())
    return Balance(
        documents={
            "read": len(lengths),
            "packed": int((num_segments > 0).sum()),
            "split": int((num_segments > 1).sum()),
            "truncated": int(truncated.sum()),
            "dropped": _nonzero({reason: int(which.sum()) for reason, which in dropped.items()}),
        },
        tokens={"read": int(lengths.sum()), "packed": int(kept.sum()), "lost": _nonzero(lost_tokens)},
        targets={"read": int(targets.sum()), "packed": targets_packed, "lost": _nonzero(lost)},
    )


def _boundary_targets(documents: Documents, segments: Segments) -> int:
    """Count the targets that begin a segment inside their document: nothing in their pack predicts them."""
    inner = segments.start > 0
    firsts = documents.offsets[segments.document[inner]] + segments.start[inner]
    return len(firsts) if documents.loss_mask is None else int(documents.loss_mask[firsts].sum())


def _nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in counts.items() if number}


def _turns(documents: Documents, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Return the turn ends of the chosen documents, as `cut` takes them."""
    assert documents.turn_ends is not None
    assert documents.turn_offsets is not None
    lengths = np.diff(documents.turn_offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return {
        "turn_ends": documents.turn_ends[np.isin(owner, chosen)],
        "turn_offsets": np.concatenate([[0], np.cumsum(lengths[chosen])]),
    }
