"""The figures of a finished dataset, from its manifest and index alone (`docs/report.md` documents the result).

Pure functions: what goes in is an open `Dataset`, what comes out is a tree of plain numbers that `terminal.py` prints
and `pages.py` draws. No shard is opened, so a dataset of a thousand shards answers in well under a second; `rows.py`
reads rows. Lengths come from histograms that are exact up to 256 tokens and within 1.6 % above.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from pipeline.packing.choice import histogram_bound
from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.report.flops import DEFAULT_SHAPE, ModelShape
from pipeline.report.padding import LengthHistogram, compare_feedings
from pipeline.report.records import (
    BlockShuffle,
    CostFigures,
    DatasetReport,
    FillAtLength,
    FillFigures,
    LengthFigures,
    MixFigures,
    SegmentsPerPack,
    SourceFigures,
    StragglerFigures,
)
from pipeline.report.warnings import find_warnings
from shards.counts import Counts, Histogram, HistogramSum
from shards.errors import PackError
from shards.manifest import SourceTotals
from shards.ordering.block_order import SHUFFLE_BLOCK_SHARDS, meeting_share
from shards.ordering.step_order import StepOrder
from shards.reader import Dataset
from shards.tables.index import Index

REPORT_VERSION = 2
PERCENTILES = (1, 5, 25, 50, 75, 95, 99, 99.9)
RANKS = (8, 64, 512)
ORDER_SETTINGS = {
    "shuffled": ("shuffled", 1),
    "cost-grouped": ("cost-grouped", 1),
    "shuffled, 8 micro-batches": ("shuffled", 8),
}
MAX_PACKS = 100_000
MAX_STEPS = 200
FILL_CLASSES = 50
SEQ_LENS = tuple(1 << k for k in range(10, 18))
"Capacities that reports and estimates try."


def inspect_dataset(
    dataset: Dataset,
    *,
    packs_per_step: int = 32,
    shape: ModelShape = DEFAULT_SHAPE,
    mix: dict[str, float] | None = None,
) -> DatasetReport:
    """Return every figure of a dataset.

    Args:
        dataset: An open dataset.
        packs_per_step: Packs that one optimizer step consumes.
        shape: The model whose FLOPs weigh tokens against attention pairs.
        mix: Weight by source name, as `pack train --mix` takes it.

    Raises:
        PackError: `mix` names a source that the dataset does not have.
    """
    manifest, index = dataset.manifest, dataset.index
    totals = manifest["totals"]
    segments = to_histogram(merge_histograms([source["segment_lengths"] for source in manifest["sources"]]))
    limit = dataset.plan["packer"]["max_segments"]
    min_packs = sum(fewest_packs(source["segment_lengths"], dataset.seq_len, limit) for source in manifest["sources"])
    min_packs_of_windows = sum(source["bound_packs"] for source in manifest["sources"])
    steps, left_over = divmod(len(dataset), packs_per_step)
    padded = dataset.packer == "bucketed"
    feedings = compare_feedings(segments, dataset.seq_len, shape, dataset.packer, len(dataset))
    if not padded:
        feedings[0]["attention_pairs"] = int(index.attention_pairs.sum())  # known exactly, no need of the histogram
    report: DatasetReport = {
        "report": REPORT_VERSION,
        "path": dataset.location,
        "dataset_id": manifest["dataset_id"],
        "plan_id": manifest["plan_id"],
        "plan": plan_summary(dataset),
        "documents": totals["documents"],
        "tokens": totals["tokens"],
        "targets": totals["targets"],
        "segments": totals["segments"],
        "packs": totals["packs"],
        "fill": fill_figures(index.num_tokens, dataset.seq_len, min_packs, min_packs_of_windows),
        "lengths": length_figures(dataset),
        "segments_per_pack": segments_per_pack_figures(index.num_segments),
        "cost": cost_figures(index, padded=padded),
        "feedings": feedings,
        "model": {"name": shape.name, "vocab_size": shape.vocab_size, "max_positions": shape.max_positions},
        "steps": {"packs_per_step": packs_per_step, "per_epoch": steps, "left_over_packs": left_over},
        "block_shuffle": block_shuffle_figures(dataset),
        "sources": [source_figures(source, totals) for source in manifest["sources"]],
        "mix": mix_passes(manifest["sources"], mix or {}),
        "disk": {"bytes": int(dataset.shards.columns["bytes"].sum()), "shards": len(dataset.shards)},
        "build": manifest["facts"],
        "warnings": [],
    }
    report["warnings"] = find_warnings(report)
    return report


def block_shuffle_figures(dataset: Dataset) -> BlockShuffle:
    """Return how far the order block-shuffled, with blocks of the usual size, is from a full shuffle."""
    packs, sources = dataset.shards.columns["packs"], dataset.shards.columns["source"]
    by_source = {name: meeting_share(packs[sources == number]) for number, name in enumerate(dataset.shards.sources)}
    return {
        "block_shards": SHUFFLE_BLOCK_SHARDS,
        "meeting_share": meeting_share(packs),
        "by_source": by_source,
    }


def plan_summary(dataset: Dataset) -> dict[str, Any]:
    """Return what determined the dataset's bytes, without the lists of files and windows."""
    plan = dataset.plan
    sources = [
        {**source, "files": len(source["files"]), "bytes": sum(file["bytes"] or 0 for file in source["files"])}
        for source in plan["sources"]
    ]
    return {**plan, "packer": dataset.packer, "sources": sources, "windows": len(plan["windows"])}


def length_figures(dataset: Dataset) -> LengthFigures:
    """Return percentiles and histogram of documents as tokenized, and of segments as packed."""
    sources = dataset.manifest["sources"]
    documents, segments = (
        merge_histograms([source[key] for source in sources]) for key in ("lengths", "segment_lengths")
    )
    longest = int(dataset.index.max_seqlen.max(initial=0))
    overlong = [entry["tokens"] for source in sources for entry in source["longest"]]
    return {
        "documents": length_percentiles(documents) | {"max": max([longest, *overlong]), "histogram": documents},
        "segments": length_percentiles(segments) | {"max": longest, "histogram": segments},
    }


def mix_passes(sources: Sequence[SourceTotals], mix: dict[str, float]) -> list[MixFigures]:
    """Return how often a mix by tokens goes through each source until it has seen the last of them once.

    Raises:
        PackError: `mix` names a source that the dataset does not have.
    """
    tokens = {source["name"]: source["counts"]["tokens"]["packed"] for source in sources}
    for name in mix:
        if not tokens.get(name):
            raise PackError(f"`mix`: {name}; the dataset has no tokens of such a source, it has {', '.join(tokens)}.")
    pace = {name: weight / tokens[name] for name, weight in mix.items() if weight > 0}
    return [{"source": name, "weight": mix[name], "passes": rate / min(pace.values())} for name, rate in pace.items()]


def merge_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """Add histograms of `[lower edge, how many, tokens]`, class by class."""
    total = HistogramSum()
    for histogram in histograms:
        total.add(histogram)
    return total.total()


def to_histogram(histogram: list[list[int]]) -> LengthHistogram:
    """Return a histogram as attention rows, each class at its mean length."""
    table = np.array(histogram, np.float64).reshape(-1, 3)
    return LengthHistogram(table[:, 2] / table[:, 1], table[:, 1])


def length_percentiles(histogram: list[list[int]]) -> dict[str, Any]:
    """Return count, mean and nearest-rank percentiles of lengths, in tokens."""
    if not histogram:
        return {"count": 0}
    rows = to_histogram(histogram)
    below = np.cumsum(rows.counts)
    count = int(below[-1])
    ranks = [max(1, int(np.ceil(count * p / 100))) for p in PERCENTILES]
    classes = np.searchsorted(below, ranks)
    figures = {f"p{p:g}": round(rows.lengths[k]) for p, k in zip(PERCENTILES, classes, strict=True)}
    return {"count": count, "mean": rows.slots / count} | figures


def fewest_packs(histogram: list[list[int]], seq_len: int, max_segments: int | None) -> int:
    """Return a lower bound on the packs of segments with these lengths, however they were spread over windows.

    Args:
        histogram: `[lower edge, segments, tokens]`; every segment counts as no longer than its class's lower edge.
        seq_len: Capacity of a pack, in tokens.
        max_segments: Maximum number of segments in one pack; None for no limit.
    """
    at_edges, tokens = np.zeros(seq_len + 1, np.int64), 0
    for edge, count, total in histogram:
        at_edges[edge] += count
        tokens += total
    return max(histogram_bound(at_edges, max_segments), -(-tokens // seq_len))


def fill_figures(num_tokens: np.ndarray, seq_len: int, min_packs: int, min_packs_of_windows: int) -> FillFigures:
    """Return how full packs are, and how far their number is from the fewest possible.

    Args:
        num_tokens: Tokens per pack, int32 (num_packs,).
        seq_len: Capacity of a pack, in tokens.
        min_packs: A lower bound on packs, summed over sources.
        min_packs_of_windows: The same where every window is packed by itself, as a build does it.
    """
    packs = len(num_tokens)
    edges = np.linspace(0, seq_len, FILL_CLASSES + 1)
    counts, _ = np.histogram(num_tokens, edges)
    return {
        "rate": float(num_tokens.sum(dtype=np.int64)) / (packs * seq_len) if packs else 0.0,
        "min_packs": min_packs,
        "min_packs_of_windows": min_packs_of_windows,
        "above_min": packs / min_packs - 1.0 if min_packs else 0.0,
        "histogram": [[float(edge), int(count)] for edge, count in zip(edges[:-1], counts, strict=True) if count],
    }


def segments_per_pack_figures(num_segments: np.ndarray) -> SegmentsPerPack:
    """Return mean, largest and histogram `[segments, packs]` of segments per pack."""
    if not len(num_segments):
        return {"mean": 0.0, "max": 0, "histogram": []}
    counts = np.bincount(num_segments)
    return {
        "mean": float(num_segments.mean()),
        "max": int(num_segments.max()),
        "histogram": [[int(k), int(counts[k])] for k in np.flatnonzero(counts)],
    }


def cost_figures(index: Index, *, padded: bool) -> CostFigures:
    """Return the spread of attention work over packs, and what it makes ranks wait for each other.

    Args:
        index: Figures per pack.
        padded: Whether rows get padded: steps then hold rectangles of one padded length, not packs.
    """
    pairs = index.attention_pairs
    octaves = np.bincount(np.frexp(pairs)[1] - 1)
    return {
        "attention_pairs": int(pairs.sum()),
        "octaves": [[2 ** int(k), int(octaves[k])] for k in np.flatnonzero(octaves)],
        "straggler": [] if padded else straggler_figures(index),
    }


def source_figures(source: SourceTotals, totals: Counts) -> SourceFigures:
    """Return one source's balance sheet, its share of all tokens and targets, and its longest documents."""
    counts = source["counts"]

    def share(thing: Literal["tokens", "targets"]) -> float:
        total = totals[thing]["packed"]
        return counts[thing]["packed"] / total if total else 0.0

    return {
        "name": source["name"],
        "documents": counts["documents"],
        "tokens": counts["tokens"],
        "targets": counts["targets"],
        "segments": counts["segments"],
        "packs": counts["packs"],
        "share_of_tokens": share("tokens"),
        "share_of_targets": share("targets"),
        "lengths": length_percentiles(source["lengths"]),
        "longest": source["longest"],
    }


def straggler_figures(index: Index) -> list[StragglerFigures]:
    """Return how long ranks wait for the slowest, for each of RANKS and each way of `ORDER_SETTINGS` to make steps.

    The factor is the mean over steps of the slowest rank's work / the mean rank's; 1.0 is a perfect deal, None means
    too few packs for a step. Large datasets are judged by an even choice of packs.
    """
    stride = -(-len(index.num_tokens) // MAX_PACKS) or 1
    thinned = Index(**{name: figures[::stride] for name, figures in index.columns().items()})
    entries: list[StragglerFigures] = []
    for ranks in RANKS:
        orders: dict[str, float | None] = {}
        for name, (order, batches) in ORDER_SETTINGS.items():
            enough = len(thinned.num_tokens) >= ranks * batches
            steps = StepOrder(thinned, packs_per_step=ranks * batches, order=order) if enough else None
            orders[name] = steps.straggler_factor(0, ranks, MAX_STEPS) if steps else None
        entries.append({"ranks": ranks, "orders": orders})
    return entries


def fill_by_seq_len(lengths: np.ndarray) -> list[FillAtLength]:
    """Return fill and share of documents cut at every seq_len, for the documents of a built dataset.

    Args:
        lengths: Tokens per document, int64 (num_documents,).
    """
    entries: list[FillAtLength] = []
    for seq_len in SEQ_LENS if len(lengths) else ():
        segments = cut(lengths, seq_len, "split").length
        bins = PACKERS["auto"](segments, seq_len)
        full = float(segments.sum()) / (bins.num_bins * seq_len)
        entries.append({"seq_len": seq_len, "fill": full, "documents_cut": float((lengths > seq_len).mean())})
    return entries
