"""One window: a fixed slice of the corpus becomes one shard and its sidecar.

A window is a pure function of (plan, window number): read, tokenize, cut, pack, gather, write. Nothing crosses windows,
so any number of workers, any engine and any interruption give the same bytes; the price is one under-filled pack per
window. Peak memory is a small multiple of the window's bytes, whatever the size of the corpus.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.building.stages import Stages
from pipeline.documents.make import DocumentMaker
from pipeline.packing.cutting import Segments, cut
from pipeline.packing.packers import PACKERS, lower_bound
from pipeline.packing.rows import count_targets, gather, mask_or_empty
from pipeline.sources.reader import RecordBatch, Rejected, WindowReader
from pipeline.sources.windows import Slice, Source
from pipeline.tokens import Documents, concatenate
from shards.errors import PackError
from shards.manifest import LONGEST, empty_counts, length_histogram, sidecar_name
from shards.plan import Plan
from shards.publish import Store, seal
from shards.schema import FORMAT, VERSION, layout_of
from shards.writer import encode_index, write_shard

Tick = Callable[[int, int, int], None]  # documents, tokens, raw bytes done since the last call


@dataclass(frozen=True)
class Task:
    """What a worker needs to know of one window, beside the plan."""

    window: int
    source: int
    slices: tuple[Slice, ...]
    payload: bytes | None = None
    "Raw JSONL bytes, where the driver read them (compressed files, stdin, streams)."

    def describe(self, sources: list[Source]) -> str:
        """Return where in the corpus this window lies, for messages."""
        source = sources[self.source]
        parts = [f"{source.files[slice_.file].name}[{slice_.start}:{slice_.stop}]" for slice_ in self.slices[:3]]
        more = f" and {len(self.slices) - 3} more" if len(self.slices) > 3 else ""
        return f"window {self.window} (source {source.name!r}: {', '.join(parts)}{more})"


@dataclass(frozen=True)
class Job:
    """What all windows of a build share; travels to every worker once."""

    plan: Plan
    plan_id: str
    sources: list[Source]
    out: str
    tokenizer_files: dict[str, bytes]
    tokenizer_engine: str
    on_error: str


def run_window(job: Job, task: Task, store: Store, maker: DocumentMaker, stages: Stages, tick: Tick) -> dict[str, Any]:
    """Build, publish and commit one window.

    Args:
        job: What all windows share.
        task: This window.
        store: Where to publish.
        maker: Makes the documents of this window's source, with the process's tokenizer.
        stages: Where the seconds of each stage are added.
        tick: Called as documents are done.

    Returns:
        What the driver keeps count of: window, counts, raw_bytes, busy_s.
    """
    source = job.sources[task.source]
    reader = WindowReader(source, task.slices, on_error=job.on_error, payload=task.payload)
    encoder = maker.encoder
    trusted = not encoder.guard_failed
    limit = job.plan["seq_len"]
    documents, dropped = read_documents(reader, maker, task.window, stages, tick, limit)
    if trusted and encoder.guard_failed:  # what this window already took from the fast engine is in doubt
        reader = WindowReader(source, task.slices, on_error=job.on_error, payload=task.payload)
        documents, dropped = read_documents(reader, maker, task.window, stages, tick, limit)
    layout = layout_of(job.plan)
    packer = job.plan["packer"]
    counts = empty_counts()
    counts["documents"] |= {"read": reader.num_records, "dropped": dropped}
    with stages.time("pack"):
        segments = _segments(documents, source, job.plan, counts)
        pack = PACKERS["next-fit" if packer["name"] == "wrapped" else packer["name"]]
        limits = {"max_segments": packer["max_segments"]}
        bins = pack(segments.length, layout.seq_len, seed=job.plan["seed"] + task.window, **limits)
        bound = lower_bound(segments.length, layout.seq_len, **limits)
    with stages.time("gather"):
        rows = gather(documents, segments, bins, layout)
    counts |= {"segments": len(segments.length), "packs": len(rows)}
    lengths = documents.lengths
    overlong = np.flatnonzero(lengths > layout.seq_len)
    longest = overlong[np.argsort(-lengths[overlong], kind="stable")[:LONGEST]]
    with stages.time("write"):
        shard = write_shard(store, layout, job.plan_id, task.window, rows, spent=stages.inside("write"))
    sidecar = {
        "format": FORMAT,
        "version": VERSION,
        "plan_id": job.plan_id,
        "window": task.window,
        "source": source.name,
        "shard": shard,
        "counts": counts,
        "bound_packs": bound,
        "lengths": length_histogram(lengths),
        "segment_lengths": length_histogram(segments.length),
        "longest": [{"doc_id": int(documents.doc_ids[k]), "tokens": int(lengths[k])} for k in longest],
        "spans": [list(span) for span in reader.spans],
        "input_xxh3": reader.input_xxh3,
        "raw_bytes": reader.raw_bytes,
        "rejected": [_rejected(entry, task.window) for entry in reader.rejected],
        "index": encode_index(rows.index()),
        "facts": {
            "tokenizer": encoder.facts(),
            "host": platform.node(),
            "pid": os.getpid(),
            "stages_s": {name: round(seconds, 6) for name, seconds in stages.seconds.items()},
        },
    }
    with stages.time("write"):
        store.put(sidecar_name(task.window), seal(sidecar))
    kept = {name: sidecar[name] for name in ("window", "counts", "raw_bytes")}
    return kept | {"busy_s": sum(stages.seconds.values())}


def _rejected(entry: Rejected, window: int) -> dict[str, Any]:
    return {"doc_id": (window << 32) + entry.index, "where": entry.where, "reason": entry.reason, "record": entry.raw}


def read_documents(
    reader: WindowReader,
    maker: DocumentMaker,
    window: int,
    stages: Stages,
    tick: Tick,
    seq_len: int | None = None,
) -> tuple[Documents, dict[str, int]]:
    """Read and tokenize a window; return its documents, and how many records gave none, by reason.

    With `seq_len` and the policy "error", the first document longer than that raises PackError.
    """
    options = reader.source.options
    parts: list[Documents] = []
    dropped: dict[str, int] = {}
    reader.spent = stages.inside("read")
    batches = iter(reader)
    while True:
        with stages.time("read"):
            batch = next(batches, None)
        if batch is None:
            break
        with stages.time("tokenize"):
            documents, drops = maker.make(batch)
        if options.overlong_policy == "error" and seq_len is not None:
            _check_lengths(documents, batch, seq_len)
        for reason, number in drops.items():
            dropped[reason] = dropped.get(reason, 0) + number
        parts.append(documents)
        tick(len(batch.indices), len(documents.input_ids), batch.raw_bytes)
    if reader.rejected:
        dropped["rejected"] = len(reader.rejected)
    with stages.time("gather"):
        return concatenate(parts, window), dropped


def _segments(documents: Documents, source: Source, plan: Plan, counts: dict[str, Any]) -> Segments:
    """Cut documents into segments, and enter into `counts` all that does not come through.

    A document leaves as a whole when it has no target (before or after cutting) or when the policy gives it no segment;
    one that stays may lose its far end, and the targets that became first tokens of a segment.
    """
    options, seq_len = source.options, plan["seq_len"]
    wrapped = plan["packer"]["name"] == "wrapped"
    lengths, begins = documents.lengths, documents.offsets[:-1]
    mask = mask_or_empty(documents)
    targets = count_targets(mask, begins, lengths)
    wanted = (targets > 0) | options.keep_no_target
    chosen = np.flatnonzero(wanted)
    policy = "wrapped" if wrapped else options.overlong_policy
    turns = _turns(documents, chosen) if policy == "truncate-turns" else {}
    pieces = cut(lengths[chosen], seq_len, policy, truncate_side=options.truncate_side, **turns)
    segments = Segments(chosen[pieces.document], pieces.start, pieces.length)

    held = count_targets(mask, begins[segments.document] + segments.start, segments.length.astype(np.int64))
    kept_targets = np.bincount(segments.document, held, len(lengths)).astype(np.int64)
    num_pieces = np.bincount(segments.document, minlength=len(lengths))
    alive = (num_pieces > 0) & ((kept_targets > 0) | options.keep_no_target | wrapped)
    if not alive[segments.document].all():
        keep = alive[segments.document]
        segments, held = Segments(*(column[keep] for column in segments)), held[keep]

    kept = np.bincount(segments.document, segments.length, len(lengths)).astype(np.int64)
    overlong = wanted & (num_pieces == 0)
    no_target = ~alive & ~overlong
    cut_short = alive & (kept < lengths)
    inner = segments.start > 0
    firsts = begins[segments.document[inner]] + segments.start[inner]
    boundary = int(mask[firsts].sum()) if len(mask) else len(firsts)
    targets_packed, targets_read = int(held.sum()), int(targets.sum())
    lost = {name: int(targets[which].sum()) for name, which in (("overlong", overlong), ("no_target", no_target))}
    lost["boundary"] = boundary
    lost["truncated"] = targets_read - targets_packed - sum(lost.values())
    counts["targets"] = {"read": targets_read, "packed": targets_packed, "lost": _some(lost)}
    counts["tokens"] = {
        "read": int(lengths.sum()),
        "packed": int(kept.sum()),
        "lost": _some(
            {
                "overlong": int(lengths[overlong].sum()),
                "no_target": int(lengths[no_target].sum()),
                "truncated": int((lengths - kept)[cut_short].sum()),
            }
        ),
    }
    sheet = counts["documents"]
    sheet["packed"], sheet["split"] = int(alive.sum()), int((alive & (num_pieces > 1)).sum())
    sheet["truncated"] = int(cut_short.sum())
    sheet["dropped"] |= _some({"overlong": int(overlong.sum()), "no_target": int(no_target.sum())})
    return segments


def _some(counts: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in counts.items() if number}


def _turns(documents: Documents, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Return the turn ends of the chosen documents, as `cut` takes them."""
    assert documents.turn_ends is not None
    assert documents.turn_offsets is not None
    lengths = np.diff(documents.turn_offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    ends = documents.turn_ends[np.isin(owner, chosen)]
    return {"turn_ends": ends, "turn_offsets": np.append(0, np.cumsum(lengths[chosen]))}


def _check_lengths(documents: Documents, batch: RecordBatch, seq_len: int) -> None:
    """Stop at the first document that is too long, where the user asked for that."""
    lengths = documents.lengths
    over = np.flatnonzero(lengths > seq_len)
    if len(over):
        raise PackError(
            f"{batch.where(int(documents.doc_ids[over[0]]))}: has {lengths[over[0]]:,} tokens; expected at most "
            f"{seq_len:,}. Choose another --overlong (split, truncate, drop) or a larger --seq-len."
        )
