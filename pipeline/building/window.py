"""One window: a fixed slice of the corpus becomes one shard and its sidecar.

A window is a pure function of (plan, window number): read, tokenize, cut, pack, assemble, write. Nothing crosses
windows, so any number of workers, any engine and any interruption give the same bytes; the price is one under-filled
pack per window. Peak memory is a small multiple of the window's bytes, whatever the size of the corpus.
"""

import os
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.building.inputs import file_marks
from pipeline.building.stages import Stages
from pipeline.documents.encoder import EngineChoice
from pipeline.documents.make import DocumentMaker
from pipeline.documents.tokenizer import TokenizerImage
from pipeline.packing.accounting import cut_documents
from pipeline.packing.packers import PACKERS, lower_bound
from pipeline.packing.rows import align_up, assemble_rows
from pipeline.packing.warm_up import compile_kernels
from pipeline.sources.reader import RecordBatch, Rejected, WindowReader
from pipeline.sources.windows import Slice, Source
from pipeline.tokens import Documents, concatenate
from shards.counts import Counts, length_histogram
from shards.errors import PackError
from shards.plan import Plan
from shards.publish import Store, seal
from shards.schema import doc_id, layout_of
from shards.sidecar import MAX_LONGEST, Rejection, make_sidecar, sidecar_name
from shards.writer import write_shard

MANY_TOKENS = 1 << 21  # from here on machine code pays for being loaded


@dataclass(frozen=True)
class Task:
    """What a worker needs to know of one window, beside the plan."""

    window: int
    source: int
    slices: tuple[Slice, ...]
    payloads: tuple[bytes, ...] | None = None
    "Raw JSONL bytes of each slice, where the driver read them (compressed files, stdin, streams)."

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
    images: dict[bool, TokenizerImage]
    "What encoders are made of, by `parse_special`."
    engines: EngineChoice
    on_error: str


def run_window(job: Job, task: Task, store: Store, maker: DocumentMaker, stages: Stages) -> dict[str, Any]:
    """Build, publish and commit one window.

    Args:
        job: What all windows share.
        task: This window.
        store: Where to publish.
        maker: Makes the documents of this window's source, with the process's tokenizer.
        stages: Where the seconds of each stage are added.

    Returns:
        What the driver keeps count of: window, counts, raw_bytes, busy_s.
    """
    source = job.sources[task.source]
    reader = WindowReader(source, task.slices, on_error=job.on_error, payloads=task.payloads)
    marks = file_marks(source, task.slices)  # before reading: what changes from now on is noticed
    encoder = maker.encoder
    trusted = not encoder.guard_failed
    encoder.spelled.take()
    maker.unread_fields.take()
    limit = job.plan["seq_len"]
    documents, dropped = read_documents(reader, maker, task.window, stages, limit)
    if trusted and encoder.guard_failed:  # what this window already took from the fast engine is in doubt
        encoder.spelled.take()
        maker.unread_fields.take()
        reader = WindowReader(source, task.slices, on_error=job.on_error, payloads=task.payloads)
        documents, dropped = read_documents(reader, maker, task.window, stages, limit)
    layout = layout_of(job.plan)
    if len(documents.input_ids) > MANY_TOKENS:
        with stages.time("load"):
            compile_kernels(layout)  # the driver has begun to, or this process is the first on its machine
    with stages.time("pack"):
        packer = PACKERS[job.plan["packer"]["name"]]
        segments, balance = cut_documents(documents, source.options, layout.seq_len, packer.cut_policy)
        limits = {"max_segments": job.plan["packer"]["max_segments"]}
        slots = align_up(segments.length, layout.align)
        bins = packer(slots, layout.seq_len, seed=job.plan["seed"] + task.window, **limits)
        bound = lower_bound(slots, layout.seq_len, **limits)
    with stages.time("assemble"):
        rows = assemble_rows(documents, segments, bins, layout)
    counts: Counts = {
        "documents": {
            **balance.documents,
            "read": reader.num_records + _more_than_records(documents),
            "dropped": dropped | balance.documents["dropped"],
        },
        "tokens": balance.tokens,
        "targets": balance.targets,
        "segments": len(segments.length),
        "packs": len(rows),
    }
    lengths = documents.lengths
    overlong = np.flatnonzero(lengths > layout.seq_len)
    longest = overlong[np.argsort(-lengths[overlong], kind="stable")[:MAX_LONGEST]]
    with stages.time("write"):
        shard = write_shard(store, layout, job.plan_id, task.window, rows)
    sidecar = make_sidecar(
        plan_id=job.plan_id,
        window=task.window,
        source=source.name,
        shard=shard,
        counts=counts,
        index=rows.index(layout),
        bound_packs=bound,
        lengths=length_histogram(lengths),
        segment_lengths=length_histogram(segments.length),
        longest=[{"doc_id": int(documents.doc_ids[k]), "tokens": int(lengths[k])} for k in longest],
        spans=reader.spans,
        input_xxh3=reader.input_xxh3,
        raw_bytes=reader.raw_bytes,
        rejected=[_rejected(entry, task.window) for entry in reader.rejected],
        facts={
            "tokenizer": encoder.facts(),
            "trained_end_ids": maker.trained_ends(documents),
            "unrolled": maker.unrolled(documents),
            "spelled_controls": encoder.spelled.take(),
            "unread_fields": maker.unread_fields.take(),
            "files": marks,
            "host": platform.node(),
            "pid": os.getpid(),
            "stages_s": {name: round(seconds, 6) for name, seconds in stages.seconds.items()},
        },
    )
    with stages.time("write"):
        store.put(sidecar_name(task.window), seal(sidecar))
    return {
        "window": task.window,
        "counts": counts,
        "raw_bytes": reader.raw_bytes,
        "busy_s": sum(stages.seconds.values()),
    }


def _more_than_records(documents: Documents) -> int:
    """Count the documents beyond the first of each record."""
    return 0 if documents.doc_parts is None else len(documents.doc_ids) - len(np.unique(documents.doc_ids))


def _rejected(entry: Rejected, window: int) -> Rejection:
    return {"doc_id": doc_id(window, entry.index), "where": entry.where, "reason": entry.reason, "record": entry.raw}


def read_documents(
    reader: WindowReader,
    maker: DocumentMaker,
    window: int,
    stages: Stages,
    seq_len: int | None = None,
) -> tuple[Documents, dict[str, int]]:
    """Read and tokenize a window; return its documents, and how many records gave none, by reason.

    With `seq_len` and the policy "error", the first document longer than that raises PackError.
    """
    options = reader.source.options
    parts: list[Documents] = []
    dropped: dict[str, int] = {}
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
    if reader.rejected:
        dropped["rejected"] = len(reader.rejected)
    with stages.time("assemble"):
        return concatenate(parts, window), dropped


def _check_lengths(documents: Documents, batch: RecordBatch, seq_len: int) -> None:
    """Stop at the first document that is too long, where the user asked for that."""
    lengths = documents.lengths
    over = np.flatnonzero(lengths > seq_len)
    if len(over):
        raise PackError(
            f"{batch.where(int(documents.doc_ids[over[0]]))}: has {lengths[over[0]]:,} tokens; expected at most "
            f"{seq_len:,}. Choose another `overlong` (split, truncate, drop) or a larger `seq_len`."
        )
