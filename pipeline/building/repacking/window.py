"""One window of a dataset packed anew: its documents joined, cut, packed and written, and the balance of it."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeline.building.repacking.joining import StoredWindow, join_documents
from pipeline.building.selection import REASONS, Selection
from pipeline.building.stages import Stages
from pipeline.config import RecordOptions
from pipeline.packing.accounting import Balance, cut_documents
from pipeline.packing.packers import PACKERS, lower_bound
from pipeline.packing.rows import align_up, assemble_rows, count_targets, mask_or_empty
from pipeline.tokens import Documents
from shards.counts import Counts, length_histogram
from shards.errors import PackError
from shards.plan import Plan, plan_id
from shards.publish import LocalStore, Store, seal
from shards.reader import Dataset
from shards.schema import layout_of
from shards.sidecar import MAX_LONGEST, LongDocument, Sidecar, make_sidecar, read_sidecar, sidecar_name
from shards.writer import write_shard


def repack_window(
    dataset: Dataset, number: int, plan: Plan, options: RecordOptions, selection: Selection, store: Store
) -> Counts:
    """Pack the documents of one window anew, publish and commit it; return its counts."""
    stages, layout = Stages(), layout_of(plan)
    dataset.file(sidecar_name(number))  # of a URL, it is here from now on
    before = sidecar_of(LocalStore(dataset.path), number)
    with stages.time("read"):
        stored = join_documents(dataset, number)
        heads = int(stored.first_targets.sum())
        stored, aside = _set_aside(stored, selection.reasons(stored, number))
    documents = stored.documents
    with stages.time("pack"):
        packer = PACKERS[plan["packer"]["name"]]
        segments, balance = cut_documents(documents, options, layout.seq_len, packer.cut_policy)
        slots = align_up(segments.length, layout.align)
        limits = {"max_segments": plan["packer"]["max_segments"]}
        bins = packer(slots, layout.seq_len, seed=plan["seed"] + number, **limits)
        bound = lower_bound(slots, layout.seq_len, **limits)
    with stages.time("assemble"):
        rows = assemble_rows(documents, segments, bins, layout)
        document, begins = segments.document[bins.order], segments.start[bins.order] == 0
        rows = replace(
            rows,
            doc_offsets=(rows.doc_offsets + stored.first_offsets[document]).astype(np.int32),
            start_targets=np.where(begins, stored.first_targets[document], rows.start_targets).astype(np.uint8),
        )
        if rows.start_weights is not None and stored.first_weights is not None:
            weights = np.where(begins, stored.first_weights[document], rows.start_weights)
            rows = replace(rows, start_weights=weights.astype(np.float16))
    counts = _counts(before["counts"], balance, aside, heads, len(segments.length), len(rows))
    with stages.time("write"):
        shard = write_shard(store, layout, plan_id(plan), number, rows)
    sidecar = make_sidecar(
        plan_id=plan_id(plan),
        window=number,
        source=before["source"],
        shard=shard,
        counts=counts,
        index=rows.index(layout),
        bound_packs=bound,
        lengths=before["lengths"],
        segment_lengths=length_histogram(segments.length),
        longest=_longest(before, documents, layout.seq_len),
        spans=before["spans"],
        input_xxh3=before["input_xxh3"],
        raw_bytes=before["raw_bytes"],
        rejected=before["rejected"],
        facts={**before["facts"], "stages_s": {name: round(seconds, 6) for name, seconds in stages.seconds.items()}},
    )
    store.put(sidecar_name(number), seal(sidecar))
    return counts


def sidecar_of(store: Store, window: int) -> Sidecar:
    """Return the sidecar of a window of a whole dataset.

    Raises:
        PackError: It is not there.
    """
    sidecar = read_sidecar(store, window)
    if sidecar is None:
        raise PackError(f"{store.location}: window {window} has no sidecar; expected a whole dataset. Run pack verify.")
    return sidecar


class _Aside(NamedTuple):
    """What was set aside of a window, by reason."""

    documents: dict[str, int]
    tokens: dict[str, int]
    targets: dict[str, int]


def _set_aside(stored: StoredWindow, reasons: np.ndarray) -> tuple[StoredWindow, _Aside]:
    """Take out the documents that have a reason (see `selection.REASONS`), and count them."""
    aside = _Aside({}, {}, {})
    if not reasons.any():
        return stored, aside
    documents = stored.documents
    targets = count_targets(mask_or_empty(documents), documents.offsets[:-1], documents.lengths)
    for code in np.unique(reasons[reasons > 0]).tolist():
        which = reasons == code
        aside.documents[REASONS[code]] = int(which.sum())
        aside.tokens[REASONS[code]] = int(documents.lengths[which].sum())
        aside.targets[REASONS[code]] = int(targets[which].sum())
    stays = reasons == 0
    first_weights = None if stored.first_weights is None else stored.first_weights[stays]
    kept = StoredWindow(documents.take(stays), stored.first_offsets[stays], stored.first_targets[stays], first_weights)
    return kept, aside


def _counts(before: Counts, balance: Balance, aside: _Aside, heads: int, num_segments: int, num_packs: int) -> Counts:
    """Return the balance of a repacked window: what the corpus gave, what was lost then, and what is lost now.

    Targets that cuts had made first tokens are back, and lost again only where a new cut does so. But the `heads`,
    which begin documents whose beginning was truncated, stay lost.
    """
    then = {reason: number for reason, number in before["targets"]["lost"].items() if reason != "boundary"}
    if heads:
        then["boundary"] = heads
    return {
        "documents": {
            **balance.documents,
            "read": before["documents"]["read"],
            "truncated": before["documents"]["truncated"] + balance.documents["truncated"],
            "dropped": _sum(before["documents"]["dropped"], balance.documents["dropped"], aside.documents),
        },
        "tokens": {
            "read": before["tokens"]["read"],
            "packed": balance.tokens["packed"],
            "lost": _sum(before["tokens"]["lost"], balance.tokens["lost"], aside.tokens),
        },
        "targets": {
            "read": before["targets"]["read"],
            "packed": balance.targets["packed"],
            "lost": _sum(then, balance.targets["lost"], aside.targets),
        },
        "segments": num_segments,
        "packs": num_packs,
    }


def _sum(*losses: dict[str, int]) -> dict[str, int]:
    reasons = sorted({reason for each in losses for reason, count in each.items() if count})
    return {reason: sum(each.get(reason, 0) for each in losses) for reason in reasons}


def _longest(before: Sidecar, documents: Documents, seq_len: int) -> list[LongDocument]:
    """Return the longest documents above `seq_len`, as they were tokenized."""
    lengths = documents.lengths
    known = {entry["doc_id"]: entry["tokens"] for entry in before["longest"]}
    found = {int(documents.doc_ids[k]): int(lengths[k]) for k in np.flatnonzero(lengths > seq_len)} | known
    chosen = sorted((item for item in found.items() if item[1] > seq_len), key=lambda item: (-item[1], item[0]))
    return [{"doc_id": number, "tokens": tokens} for number, tokens in chosen[:MAX_LONGEST]]
