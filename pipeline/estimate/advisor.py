"""What each seq_len and packer would give, from a sample of the corpus; nothing is written.

A sample is small chunks at random places of every source, read and tokenized like in a build until the time is up;
files that cannot be cut are read from their beginning. Packers then run on the sampled lengths, and counts are scaled
by bytes. Uncertainties are 95 % intervals of ratio estimates over chunks (Cochran 1977, 6.4).
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.estimate.sampling import CHUNK_BYTES, Place, chunk_readers
from pipeline.formatting import percent
from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.report.flops import DEFAULT_SHAPE, ModelShape, load_shape
from pipeline.report.padding import Rows, bucketed
from pipeline.sources.discovery import resolve_sources
from pipeline.sources.reader import WindowReader
from pipeline.sources.windows import Source, cut_windows, enumerate_streams
from shards.errors import PackError, counted

SEQ_LENS = tuple(1 << k for k in range(10, 18))
MOST_CHUNKS = 20_000  # of a corpus; larger corpora get larger chunks
FEW_CUT = 0.01  # share of documents that may be cut where a smaller seq_len is worth it
FULL = 0.98
WORSE = {"documents_cut": 1, "fill": -1, "tokens_lost": 1, "relative_cost": 1}  # the side on which a figure is worse
POLICIES = {"truncate-turns": "truncate", "error": "split"}  # stand-ins: turns are not sampled, nothing stops here
Plan = dict[str, Any]


@dataclass
class Sample:
    """What was seen of one source."""

    source: Source
    total_bytes: int | None
    "Bytes of the whole source; None where nobody knows."
    lengths: list[np.ndarray] = field(default_factory=list)
    "Tokens per document of each chunk."
    chunk_bytes: list[int] = field(default_factory=list)
    "Raw bytes of each chunk."
    rejected: int = 0
    empty: int = 0
    first_rejected: str = ""
    "Place and fault of the first bad record."
    whole: bool = False
    "Whether everything was read."

    @property
    def scale(self) -> float:
        """How many times the sample the source is."""
        seen = sum(self.chunk_bytes)
        return 1.0 if self.whole or not seen or self.total_bytes is None else max(1.0, self.total_bytes / seen)


def plan_corpus(
    *,
    sources: tuple[str, ...],
    tokenizer: str,
    records: RecordOptions,
    source_records: dict[str, RecordOptions],
    model: str | None,
    seconds: float,
    seed: int,
    workers: int,
) -> Plan:
    """Resolve SOURCE arguments, a tokenizer and a model by name, and plan; see `plan`."""
    if not seconds > 0:  # nor a number at all
        raise PackError(f"--seconds: {seconds:g}; expected more than 0, such as 20.")
    shape = load_shape(model) if model else DEFAULT_SHAPE
    found = resolve_sources(sources, records, source_records)
    if len({source.options.parse_special for source in found}) > 1:
        raise PackError("--parse-special: differs between sources; a plan needs one for all. Plan them one by one.")
    encoder = Encoder(tokenizer, parse_special=found[0].options.parse_special)
    return plan(found, encoder, seconds=seconds, seed=seed, shape=shape, workers=workers)


def plan(
    sources: list[Source],
    encoder: Encoder,
    *,
    seconds: float = 20.0,
    seed: int = 0,
    shape: ModelShape = DEFAULT_SHAPE,
    workers: int = 1,
    seq_lens: tuple[int, ...] = SEQ_LENS,
) -> Plan:
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
    samples = draw(sources, encoder, seconds, seed)
    elapsed = time.perf_counter() - begin
    lengths = np.concatenate([np.zeros(0, np.int64), *[chunk for sample in samples for chunk in sample.lengths]])
    seen = sum(sum(sample.chunk_bytes) for sample in samples)
    if not len(lengths):
        raise no_documents(samples)
    rows = [row for seq_len in seq_lens for row in outcomes(samples, seq_len, shape)]
    cheapest = min(row["flops_per_token"] for row in rows)
    for row in rows:
        row["relative_cost"] = row.pop("flops_per_token") / cheapest
    documents = sum(sum(map(len, sample.lengths)) * sample.scale for sample in samples)
    tokens = sum(sum(int(chunk.sum()) for chunk in sample.lengths) * sample.scale for sample in samples)
    spread = interval(samples, np.sum, None)
    best = recommend(rows, shape.max_positions)
    known = all(sample.whole or sample.total_bytes is not None for sample in samples)
    total = sum(sum(sample.chunk_bytes) * sample.scale for sample in samples)
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
        },
        "corpus": {
            "documents": round(documents),
            "tokens": round(tokens),
            "tokens_plus_minus": None if spread is None else round(spread * tokens),
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


def draw(sources: list[Source], encoder: Encoder, seconds: float, seed: int) -> list[Sample]:
    """Read chunks at random places, and streamed files part by part, until the time is up; some of every source."""
    sizes = [[file.bytes for file in source.files] for source in sources]
    totals = [None if any(size is None for size in each) else sum(size or 0 for size in each) for each in sizes]
    samples = [Sample(source, total) for source, total in zip(sources, totals, strict=True)]
    makers = [DocumentMaker(encoder, source.options) for source in sources]
    windows, _ = cut_windows(sources, max(CHUNK_BYTES, sum(total or 0 for total in totals) // MOST_CHUNKS))
    tasks: list[Place] = [*windows, *enumerate_streams(sources)]
    random.Random(seed).shuffle(tasks)
    heads = dict(reversed(tasks))  # the first task of each source
    tasks.sort(key=lambda task: task[1] != heads[task[0]])  # something of every source first
    deadline = time.perf_counter() + seconds
    finished = [0] * len(sources)
    for at, (number, place) in enumerate(tasks):
        if time.perf_counter() > deadline and at >= len(heads):
            break
        readers = chunk_readers(samples[number].source, place)
        finished[number] += all(_add(samples[number], reader, makers[number], deadline) for reader in readers)
    for number, sample in enumerate(samples):
        sample.whole = finished[number] == sum(task[0] == number for task in tasks)
    return samples


def _add(sample: Sample, reader: WindowReader, maker: DocumentMaker, deadline: float) -> bool:
    """Add one chunk to a sample; tell whether there is time for more."""
    late = False
    for batch in reader:
        documents, drops = maker.make(batch)
        sample.lengths.append(documents.lengths)
        sample.chunk_bytes.append(batch.raw_bytes)
        sample.empty += sum(drops.values())
        late = time.perf_counter() > deadline
        if late:
            break
    sample.rejected += len(reader.rejected)
    if reader.rejected and not sample.first_rejected:
        sample.first_rejected = str(reader.rejected[0])
    return not late


def no_documents(samples: list[Sample]) -> PackError:
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


def outcomes(samples: list[Sample], seq_len: int, shape: ModelShape) -> Iterator[dict[str, Any]]:
    """Yield what every packer would give at one `seq_len`, scaled to the corpus."""
    plus_minus = interval(samples, lambda chunk: float((chunk > seq_len).sum()), len)
    for packer in PACKERS:
        figures = np.sum([_outcome(sample, seq_len, packer, shape) for sample in samples if sample.lengths], axis=0)
        packs, kept, read, flops, documents, documents_cut = figures.tolist()
        yield {
            "seq_len": seq_len,
            "packer": packer,
            "packs": round(packs),
            "fill": kept / (packs * seq_len) if packs else 0.0,
            "documents_cut": documents_cut / documents if documents else 0.0,
            "documents_cut_plus_minus": None if PACKERS[packer].cut_policy else plus_minus,
            "tokens_lost": 1.0 - kept / read if read else 0.0,
            "flops_per_token": flops / kept if kept else float("inf"),
        }


def _outcome(sample: Sample, seq_len: int, packer: str, shape: ModelShape) -> np.ndarray:
    """Return packs, tokens kept, tokens read, FLOPs, documents, documents cut of one source; float64 (6,)."""
    lengths = np.concatenate(sample.lengths).astype(np.int64)
    policy = POLICIES.get(sample.source.options.overlong_policy, sample.source.options.overlong_policy)
    segments = cut(lengths, seq_len, PACKERS[packer].cut_policy or policy)
    bins = PACKERS[packer](segments.length, seq_len)
    values, counts = np.unique(segments.length, return_counts=True)
    rows = Rows(values.astype(np.float64), counts.astype(np.float64))
    flops = shape.cost.flops_of(*(bucketed(rows, seq_len) if packer == "bucketed" else rows))
    own = PACKERS[packer].cut_policy is not None
    split = int((np.bincount(segments.document) > 1).sum()) if own else int((lengths > seq_len).sum())
    kept = int(segments.length.sum(dtype=np.int64))
    return np.array([bins.num_bins, kept, lengths.sum(), flops, len(lengths), split], np.float64) * sample.scale


def interval(samples: list[Sample], numerator: Any, denominator: Any) -> float | None:
    """Return half the width of the 95 % interval of a ratio over chunks; None where too few were seen to tell.

    Args:
        samples: What was seen.
        numerator: Of a chunk's lengths.
        denominator: Of a chunk's lengths; None for the chunk's raw bytes, and then the result is relative to the ratio.
    """
    if all(sample.whole for sample in samples):
        return 0.0
    y = np.array([numerator(chunk) for sample in samples for chunk in sample.lengths])
    if denominator is None:
        x = np.array([float(number) for sample in samples for number in sample.chunk_bytes])
    else:
        x = np.array([float(denominator(chunk)) for sample in samples for chunk in sample.lengths])
    if len(y) < 2 or not x.sum():
        return None
    ratio = y.sum() / x.sum()
    deviation = np.sqrt(len(y) / (len(y) - 1) * np.sum((y - ratio * x) ** 2)) / x.sum()
    return float(1.96 * deviation / (ratio if denominator is None and ratio else 1.0))


def bytes_per_token(encoder: Encoder, seq_len: int) -> float:
    """Return what a token takes on disk: its id, its position and its place in the loss mask."""
    return (2 if encoder.spec.max_id < 1 << 16 else 4) + (2 if seq_len <= 1 << 16 else 4) + 1


def recommend(rows: list[dict[str, Any]], max_positions: int | None) -> dict[str, Any]:
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
    chosen = next(row for row in auto if all(row[name] * sign <= chosen[name] * sign for name, sign in WORSE.items()))
    smaller = [row for row in auto if row["seq_len"] < chosen["seq_len"]]
    reason = f"{percent(chosen['fill'])} full, {percent(chosen['documents_cut'])} of documents cut"
    left = chosen["packs"] * (1 - chosen["fill"])
    if good and chosen["fill"] < FULL and left >= 0.1:
        reason += f" (empty: {left:.1f} of {counted(chosen['packs'], 'pack')})"
    if smaller:
        reason += f"; {smaller[-1]['seq_len']} would {_shortcoming(smaller[-1], chosen)}"
    if not good:
        reason += "; no seq_len cuts few documents and fills its packs"
    if chosen["tokens_lost"] > 0:
        reason += f"; {percent(chosen['tokens_lost'])} of tokens lost to the overlong policy"
    return {"seq_len": chosen["seq_len"], "packer": "auto", "reason": reason}


def _shortcoming(row: dict[str, Any], chosen: dict[str, Any]) -> str:
    """Say in what a row is worse than the chosen one."""
    cut, full, lost = (percent(row[name]) for name in ("documents_cut", "fill", "tokens_lost"))
    if row["documents_cut"] > chosen["documents_cut"]:
        return f"cut {cut}"
    if row["fill"] < chosen["fill"]:
        return f"be {full} full and cut {cut}"
    if row["tokens_lost"] > chosen["tokens_lost"]:
        return f"lose {lost} of tokens"
    return f"cost {row['relative_cost'] / chosen['relative_cost']:.3f} times as much a token"


def fill_by_seq_len(lengths: np.ndarray) -> list[dict[str, Any]]:
    """Return fill and share of documents cut at every seq_len, for the documents of a built dataset.

    Args:
        lengths: Tokens per document, int64 (num_documents,).
    """
    entries = []
    for seq_len in SEQ_LENS if len(lengths) else ():
        segments = cut(lengths, seq_len, "split").length
        bins = PACKERS["auto"](segments, seq_len)
        full = float(segments.sum()) / (bins.num_bins * seq_len)
        entries.append({"seq_len": seq_len, "fill": full, "documents_cut": float((lengths > seq_len).mean())})
    return entries
