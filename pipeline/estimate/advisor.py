"""What each seq_len and packer would give, from a sample of the corpus; nothing is written.

A sample is small chunks at random places of every source, read and tokenized like in a build until the time is up;
files that cannot be cut are read from their beginning. Packers then run on the sampled lengths, and counts are scaled
by bytes.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.estimate.records import Estimate, Outcome, Recommendation
from pipeline.estimate.sampling import CHUNK_BYTES, draw_places, read_chunks
from pipeline.formatting import format_share
from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.report.dataset import SEQ_LENS
from pipeline.report.flops import DEFAULT_SHAPE, ModelShape, load_shape
from pipeline.report.padding import LengthHistogram, round_up_lengths
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.windows import Source, cut_windows, streamed_files, weight_of
from shards.counts import add_numbers
from shards.errors import PackError, counted

MAX_CHUNKS = 20_000  # of a corpus; larger corpora get larger chunks
MAX_WINDOWS = 16  # of a source that are packed to see what windows cost
FEW_CUT = 0.01  # share of documents that may be cut where a smaller seq_len is worth it
FULL = 0.98
POLICIES = {"truncate-turns": "truncate", "error": "split"}  # stand-ins: turns are not sampled, nothing stops here


@dataclass
class Sample:
    """What was seen of one source."""

    source: Source
    total_bytes: int | None
    "Bytes of the whole source, compressed where they are; None where nobody knows."
    lengths: list[np.ndarray] = field(default_factory=list)
    "Tokens per document, batch by batch."
    stored_bytes: int = 0
    "What was read of them."
    raw_bytes: int = 0
    "The same as it is parsed: streamed files as JSONL."
    rejected: int = 0
    empty: int = 0
    first_rejected: str = ""
    "Place and fault of the first bad record."
    whole: bool = False
    "Whether everything was read."
    num_windows: int = 1
    "How many windows a build would pack one by one."
    unread_fields: dict[str, int] = field(default_factory=dict)
    "How many records seen have a field that looks as if it mattered and that no option reads."

    @property
    def scale(self) -> float:
        """How many times the sample the source is."""
        if self.whole or not self.stored_bytes or self.total_bytes is None:
            return 1.0
        return max(1.0, self.total_bytes / self.stored_bytes)


def estimate_corpus(
    sources: str | Path | Sequence[str | Path],
    tokenizer: str | Path,
    *,
    records: RecordOptions | None = None,
    source_records: Mapping[str, RecordOptions] | None = None,
    model: str | Path | None = None,
    seconds: float = 20.0,
    seed: int = 0,
    workers: int = 1,
) -> Estimate:
    """Say what a build would give with every seq_len and packer, from a sample of the corpus; nothing is written.

    Args:
        sources: SOURCE arguments of `pack build`, or one.
        tokenizer: Directory or hub name.
        records: How records become documents; None for plain text in the field `text`.
        source_records: The same by source name.
        model: Directory, config JSON or hub name of the model whose FLOPs and positions count; None for a usual shape.
        seconds: Maximum time of sampling.
        seed: Of the places that are sampled.
        workers: Processes of the build whose time is estimated.

    Raises:
        PackError: Sources, tokenizer, model or options do not fit, or the sample holds no document.
    """
    if not seconds > 0:  # nor a number at all
        raise PackError(f"`seconds`: {seconds:g}; expected more than 0, such as 20.")
    shape = load_shape(str(model)) if model else DEFAULT_SHAPE
    listed = [sources] if isinstance(sources, str | Path) else sources
    found = resolve_sources([str(source) for source in listed], records or RecordOptions(), source_records)
    if len({source.options.parse_special for source in found}) > 1:
        raise PackError("`parse_special`: differs between sources; expected one value for all. Plan them one by one.")
    encoder = Encoder(str(tokenizer), parse_special=found[0].options.parse_special)
    return estimate_sources(found, encoder, seconds=seconds, seed=seed, shape=shape, workers=workers)


def estimate_sources(
    sources: list[Source],
    encoder: Encoder,
    *,
    seconds: float = 20.0,
    seed: int = 0,
    shape: ModelShape = DEFAULT_SHAPE,
    workers: int = 1,
    seq_lens: tuple[int, ...] = SEQ_LENS,
) -> Estimate:
    """Sample a corpus and work out what a build would give.

    Args:
        sources: From `sources.resolve_sources`.
        encoder: The tokenizer.
        seconds: Most time for reading and tokenizing.
        seed: Of the places that are sampled.
        shape: The model whose FLOPs weigh tokens against attention pairs.
        workers: Processes of the build whose time is estimated.
        seq_lens: Capacities to try, in tokens.

    Raises:
        PackError: The sample holds no document.
    """
    begin = time.perf_counter()
    samples = draw_samples(sources, encoder, seconds, seed)
    elapsed = time.perf_counter() - begin
    lengths = np.concatenate([np.zeros(0, np.int64), *[chunk for sample in samples for chunk in sample.lengths]])
    seen = sum(sample.stored_bytes for sample in samples)
    if not len(lengths):
        raise no_documents_error(samples)
    rows = [row for seq_len in seq_lens for row in try_packers(samples, seq_len, shape)]
    cheapest = min(row["relative_cost"] for row in rows)
    for row in rows:
        row["relative_cost"] /= cheapest
    documents = sum(sum(map(len, sample.lengths)) * sample.scale for sample in samples)
    tokens = sum(sum(int(chunk.sum()) for chunk in sample.lengths) * sample.scale for sample in samples)
    best = recommend(rows, shape.max_positions)
    known = all(sample.whole or sample.total_bytes is not None for sample in samples)
    total = sum(sample.stored_bytes * sample.scale for sample in samples)
    return {
        "sample": {
            "bytes": seen,
            "corpus_bytes": round(total) if known else None,
            "documents": len(lengths),
            "tokens": int(lengths.sum()),
            "seconds": elapsed,
            "whole": all(sample.whole for sample in samples),
            "rejected": sum(sample.rejected for sample in samples),
            "empty": sum(sample.empty for sample in samples),
            "first_rejected": first_rejected(samples) or None,
            "unread_fields": {sample.source.name: sample.unread_fields for sample in samples if sample.unread_fields},
        },
        "corpus": {
            "documents": round(documents),
            "tokens": round(tokens),
            "longest_seen": int(lengths.max()),
        },
        "build": {
            "seconds": total / seen * elapsed / workers,
            "workers": workers,
            "disk_bytes": round(tokens * bytes_per_token(encoder, best["seq_len"] or min(seq_lens))),
        },
        "model": shape.name,
        "outcomes": rows,
        "recommendation": best,
    }


def draw_samples(sources: list[Source], encoder: Encoder, seconds: float, seed: int) -> list[Sample]:
    """Read chunks at random places, and streamed files part by part, until the time is up; some of every source."""
    sizes = [[weight_of(file) for file in source.files] for source in sources]
    totals = [None if any(size is None for size in each) else sum(size or 0 for size in each) for each in sizes]
    samples = [Sample(source, total) for source, total in zip(sources, totals, strict=True)]
    places = draw_places(sources, max(CHUNK_BYTES, sum(total or 0 for total in totals) // MAX_CHUNKS), seed)
    deadline = time.perf_counter() + seconds
    unread = {order: index for order, (index, _) in places}
    for chunk in read_chunks(sources, places, encoder, lambda: time.perf_counter() > deadline):
        sample = samples[chunk.source]
        sample.lengths += [documents.lengths for documents in chunk.documents]
        sample.raw_bytes += chunk.raw_bytes
        sample.stored_bytes += chunk.stored_bytes
        sample.empty += chunk.empty
        sample.rejected += len(chunk.rejected)
        sample.unread_fields = add_numbers(sample.unread_fields, chunk.unread_fields)
        if chunk.rejected and not sample.first_rejected:
            sample.first_rejected = str(chunk.rejected[0])
        if chunk.whole:
            unread.pop(chunk.order, None)
        else:
            unread[chunk.order] = chunk.source
    windows, window_bytes = cut_windows(sources)
    for index, sample in enumerate(samples):
        sample.whole = index not in unread.values()
        sample.num_windows = _count_windows(sample, [w.source for w in windows].count(index), window_bytes)
    return samples


def _count_windows(sample: Sample, planned: int, window_bytes: int) -> int:
    """Return the windows of one source: those that can be cut unread, and those that its streamed files give."""
    files = [sample.source.files[index] for index in streamed_files(sample.source)]
    if not files:
        return planned
    stored = sum(weight_of(file) or 0 for file in files)
    grows = sample.raw_bytes / sample.stored_bytes if sample.stored_bytes else 1.0
    return planned + max(1, math.ceil(stored * grows / window_bytes))


def no_documents_error(samples: list[Sample]) -> PackError:
    """Return the error for a sample that holds no document, with the first fault that was seen."""
    names = ", ".join(sample.source.name for sample in samples)
    rejected, empty = (sum(getattr(sample, name) for sample in samples) for name in ("rejected", "empty"))
    first = first_rejected(samples)
    remedy = f"The first: {first}." if first else "Check the files and the field names."
    return PackError(
        f"{names}: no document in the sample ({counted(rejected, 'bad record')}, {empty:,} empty); expected at least "
        f"one. {remedy}"
    )


def first_rejected(samples: list[Sample]) -> str:
    """Return place and fault of the first bad record, without a full stop; empty where there is none."""
    return next((sample.first_rejected.rstrip(".") for sample in samples if sample.first_rejected), "")


def try_packers(samples: list[Sample], seq_len: int, shape: ModelShape) -> Iterator[Outcome]:
    """Yield what every packer would give at one `seq_len`, scaled to the corpus; costs in FLOPs a token."""
    for packer in PACKERS:
        figures = np.sum([_outcome(sample, seq_len, packer, shape) for sample in samples if sample.lengths], axis=0)
        packs, kept, read, flops, documents, documents_cut = figures.tolist()
        yield {
            "seq_len": seq_len,
            "packer": packer,
            "packs": round(packs),
            "fill": kept / (packs * seq_len) if packs else 0.0,
            "documents_cut": documents_cut / documents if documents else 0.0,
            "tokens_lost": 1.0 - kept / read if read else 0.0,
            "relative_cost": flops / kept if kept else float("inf"),
        }


def _outcome(sample: Sample, seq_len: int, packer: str, shape: ModelShape) -> np.ndarray:
    """Return packs, tokens kept, tokens read, FLOPs, documents, documents cut of one source; float64 (6,)."""
    lengths = np.concatenate(sample.lengths).astype(np.int64)
    policy = POLICIES.get(sample.source.options.overlong_policy, sample.source.options.overlong_policy)
    segments = cut(lengths, seq_len, PACKERS[packer].cut_policy or policy)
    packs = _count_packs(sample, lengths, seq_len, packer, policy)
    values, counts = np.unique(segments.length, return_counts=True)
    rows = LengthHistogram(values.astype(np.float64), counts.astype(np.float64))
    flops = shape.cost.flops_of(*(round_up_lengths(rows, seq_len) if packer == "bucketed" else rows))
    own = PACKERS[packer].cut_policy is not None
    split = int((np.bincount(segments.document) > 1).sum()) if own else int((lengths > seq_len).sum())
    kept = int(segments.length.sum(dtype=np.int64))
    return np.array([packs, kept, lengths.sum(), flops, len(lengths), split], np.float64) * sample.scale


def _count_packs(sample: Sample, lengths: np.ndarray, seq_len: int, packer: str, policy: str) -> float:
    """Return the packs of a sample's documents, in windows of as many documents as a build's.

    Each window is packed by itself and has a last pack of its own, so a few windows out of the sample stand for all; a
    sample of less than a window is packed whole.
    """
    per_window = max(1, round(len(lengths) * sample.scale / sample.num_windows))
    starts = np.arange(0, max(1, len(lengths) - per_window + 1), per_window)
    chosen = starts[np.unique(np.linspace(0, len(starts) - 1, MAX_WINDOWS).astype(int))]
    packs = documents = 0
    for start in chosen.tolist():
        window = lengths[start : start + per_window]
        segments = cut(window, seq_len, PACKERS[packer].cut_policy or policy)
        packs += PACKERS[packer](segments.length, seq_len).num_bins
        documents += len(window)
    return packs * len(lengths) / documents


def bytes_per_token(encoder: Encoder, seq_len: int) -> float:
    """Return what a token takes on disk: its id, its position and its place in the loss mask."""
    return (2 if encoder.spec.max_id < 1 << 16 else 4) + (2 if seq_len <= 1 << 16 else 4) + 1


def recommend(rows: Sequence[Outcome], max_positions: int | None) -> Recommendation:
    """Choose the smallest seq_len that cuts few documents and fills packs, or one no worse than that; say why."""
    limit = max_positions or max(row["seq_len"] for row in rows)
    auto = [row for row in rows if row["packer"] == "auto" and row["seq_len"] <= limit]
    if not auto:
        return {
            "seq_len": None,
            "packer": "auto",
            "reason": f"the model takes {limit:,} positions, fewer than any seq_len",
        }
    # the last pack may be empty: what counts is how full the others are
    good = [r for r in auto if r["documents_cut"] <= FEW_CUT and r["fill"] * r["packs"] >= FULL * (r["packs"] - 1)]
    chosen = good[0] if good else min(auto, key=lambda row: (row["documents_cut"] > FEW_CUT, -row["fill"]))
    chosen = next(row for row in auto if _is_no_worse(row, chosen))
    smaller = [row for row in auto if row["seq_len"] < chosen["seq_len"]]
    reason = f"{format_share(chosen['fill'])} full, {format_share(chosen['documents_cut'])} of documents cut"
    left = chosen["packs"] * (1 - chosen["fill"])
    if good and chosen["fill"] < FULL and left >= 0.1:
        reason += f" (empty: {left:.1f} of {counted(chosen['packs'], 'pack')})"
    if smaller:
        reason += f"; {smaller[-1]['seq_len']} would {_shortcoming(smaller[-1], chosen)}"
    if not good:
        reason += "; no seq_len cuts few documents and fills its packs"
    if chosen["tokens_lost"] > 0:
        reason += f"; {format_share(chosen['tokens_lost'])} of tokens lost to the overlong policy"
    return {"seq_len": chosen["seq_len"], "packer": "auto", "reason": reason}


def _is_no_worse(row: Outcome, chosen: Outcome) -> bool:
    return (
        row["documents_cut"] <= chosen["documents_cut"]
        and row["fill"] >= chosen["fill"]
        and row["tokens_lost"] <= chosen["tokens_lost"]
        and row["relative_cost"] <= chosen["relative_cost"]
    )


def _shortcoming(row: Outcome, chosen: Outcome) -> str:
    """Say in what a row is worse than the chosen one."""
    cut, full = format_share(row["documents_cut"]), format_share(row["fill"])
    if row["documents_cut"] > chosen["documents_cut"]:
        return f"cut {cut}"
    if row["fill"] < chosen["fill"]:
        return f"be {full} full and cut {cut}"
    if row["tokens_lost"] > chosen["tokens_lost"]:
        return f"lose {format_share(row['tokens_lost'])} of tokens"
    return f"cost {row['relative_cost'] / chosen['relative_cost']:.3f} times as much a token"
