"""The page of one or several datasets: the report's figures as plots, its tables, a few packs, the plan."""

import json
from typing import Any

import numpy as np

from pipeline.formatting import format_bytes, format_share
from pipeline.report.html import (
    Page,
    Plot,
    Section,
    Table,
    bar_trace,
    escape_label,
    line_trace,
    make_plot,
    step_trace,
    vertical_line,
)
from pipeline.report.records import DatasetReport
from pipeline.report.show import DecodedPack, pack_title, segment_title
from pipeline.report.terminal import side_by_side, tables
from shards.errors import counted

MAX_BARS = 60  # segments per pack beyond this are drawn as classes


def dataset_page(report: DatasetReport, packs: list[DecodedPack]) -> Page:
    """Return the page of one dataset.

    Args:
        report: From `report.inspect`, with `fill_by_seq_len` where it was asked for.
        packs: Sample packs, from `show.decode_pack`.
    """
    plan = report["plan"]
    dearest = max((way["relative_cost"] for way in report["feedings"]), default=1.0)
    cards = [
        {"value": format_share(report["fill"]["rate"]), "label": "fill rate"},
        {"value": format_share(report["fill"]["above_min"]), "label": "above the fewest possible packs"},
        _counted(report["packs"], "pack", f" of up to {plan['seq_len']:,} tokens"),
        _counted(report["tokens"]["packed"], "token"),
        _counted(report["targets"]["packed"], "target"),
        _counted(report["documents"]["packed"], "document"),
        {"value": f"{dearest:.1f} x", "label": "cost of padding to seq_len"},
        {"value": format_bytes(report["disk"]["bytes"]), "label": f"in {counted(report['disk']['shards'], 'shard')}"},
    ]
    by_title = {title: Table(columns, rows, title) for title, columns, rows in tables(report)}
    sections = [
        Section(
            "Packing",
            "How full packs are, and how many segments share one.",
            plots=[_fill(report), _segments_per_pack(report), *_fill_by_seq_len(report)],
        ),
        Section(
            "Lengths",
            "Documents as tokenized; the dotted line is seq_len.",
            [_lengths(report)],
            _pick(by_title, "Lengths in tokens", "Longest"),
        ),
        Section(
            "Padding avoided",
            "What the same segments would compute if they were padded, weighed by the training FLOPs of this model: "
            f"{report['model']['name']}; attention is counted on the pairs that a causal mask allows.",
            [_feedings(report)],
            _pick(by_title, "Padding avoided"),
        ),
        Section(
            "Cost",
            "Packs of equal tokens differ in attention work. A factor of 1.05 means that ranks wait 5 % of their time.",
            [_costs(report)],
            _pick(by_title, "Slowest rank"),
        ),
        Section(
            "Sources and losses",
            "Everything read is either packed or listed here.",
            _losses(report),
            _pick(by_title, "Sources", "Lost", "Read"),
        ),
        Section(
            "Sample packs",
            "Targets are shaded, special tokens coloured; everything else is only read.",
            packs=[_pack(p) for p in packs],
        ),
        Section("Plan", tables=[_plan_table(report)]),
    ]
    kept = [section for section in sections if section.plots or section.tables or section.packs]
    return Page(report["path"], f"shardpack dataset {report['dataset_id'][:16]}", cards, report["warnings"], kept)


def _counted(number: int, noun: str, more: str = "") -> dict[str, str]:
    value, label = counted(number, noun).split(" ", 1)
    return {"value": value, "label": label + more}


def comparison_page(reports: list[DatasetReport]) -> Page:
    """Return the page of several datasets side by side, one colour a dataset."""
    names = [report["path"] for report in reports]
    warned = [f"{report['path']}: {text}" for report in reports for text in report["warnings"]]
    plots = [_overlaid("Document lengths", reports), _overlaid_fill(reports)]
    sections = [
        Section("Distributions", plots=plots),
        Section("Figures", tables=[Table(["", "", *names], list(side_by_side(reports)))]),
    ]
    return Page(f"{len(reports)} datasets", ", ".join(names), [], warned, sections)


def _pick(by_title: dict[str, Table], *starts: str) -> list[Table]:
    return [table for title, table in by_title.items() if title.startswith(starts)]


def _fill(report: DatasetReport) -> Plot:
    width = 1 / 50
    edges = [(edge / report["plan"]["seq_len"] + width / 2) for edge, _ in report["fill"]["histogram"]]
    counts = [packs for _, packs in report["fill"]["histogram"]]
    axis = {"tickformat": ".0%", "range": [0, 1]}
    return make_plot(
        "How full packs are",
        [bar_trace(edges, counts, width=width)],
        x="tokens / seq_len",
        y="packs",
        xaxis=axis,
        bargap=0.05,
    )


def _segments_per_pack(report: DatasetReport) -> Plot:
    table = np.array(report["segments_per_pack"]["histogram"], np.int64).reshape(-1, 2)
    width = max(1, -(-int(table[:, 0].max(initial=1)) // MAX_BARS))
    counts = np.bincount(table[:, 0] // width, weights=table[:, 1]) if len(table) else np.zeros(0)
    kept = np.flatnonzero(counts)
    centres = (kept * width + (width - 1) / 2).tolist()
    trace = bar_trace(centres, counts[kept].tolist(), width=0.9 * width)
    axis = {"dtick": 1} if width == 1 and len(kept) < 12 else {}
    return make_plot("Segments in a pack", [trace], x="segments", y="packs", xaxis=axis)


def _fill_by_seq_len(report: DatasetReport) -> list[Plot]:
    entries = report.get("fill_by_seq_len")
    if not entries:
        return []
    x = [entry["seq_len"] for entry in entries]
    traces = [
        line_trace(x, [entry["fill"] for entry in entries], "fill rate", mode="lines+markers"),
        line_trace(x, [entry["documents_cut"] for entry in entries], "documents cut", mode="lines+markers"),
    ]
    ticks = {"type": "log", "tickvals": x, "ticktext": [f"{n // 1024}k" if n >= 1024 else str(n) for n in x]}
    return [
        make_plot(
            "Fill and cuts at other seq_len",
            traces,
            x="seq_len",
            xaxis=ticks,
            yaxis={"tickformat": ".0%", "range": [0, 1.02]},
            shapes=[vertical_line(report["plan"]["seq_len"])],
            showlegend=True,
        )
    ]


def log_classes(histogram: list[list[int]]) -> tuple[list[float], list[int]]:
    """Gather a length histogram into eighths of octaves; edges (one more than counts) and counts, for `steps`."""
    if not histogram:
        return [], []
    table = np.array(histogram, np.int64)
    classes = np.floor(8 * np.log2(table[:, 0])).astype(np.int64)
    first = int(classes.min())
    counts = np.bincount(classes - first, weights=table[:, 1]).astype(np.int64)
    edges = [2 ** ((first + k) / 8) for k in range(len(counts) + 1)]
    return [edges[0], *edges], [0, *counts.tolist(), 0]


def _lengths(report: DatasetReport) -> Plot:
    traces = [
        step_trace(*log_classes(report["lengths"][kind]["histogram"]), kind) for kind in ("documents", "segments")
    ]
    return make_plot(
        "Length distribution",
        traces,
        x="tokens",
        y="number",
        xaxis={"type": "log"},
        shapes=[vertical_line(report["plan"]["seq_len"])],
        showlegend=True,
    )


def _feedings(report: DatasetReport) -> Plot:
    names = [way["name"] for way in report["feedings"]]
    costs = [way["relative_cost"] for way in report["feedings"]]
    trace = bar_trace(costs, names, orientation="h", text=[f"{c:.2f} x" for c in costs], textposition="auto")
    return make_plot(
        f"Cost of feeding the same segments, {names[0]} = 1",
        [trace],
        x="training FLOPs",
        yaxis={"autorange": "reversed"},
    )


def _costs(report: DatasetReport) -> Plot:
    octaves = report["cost"]["octaves"]
    names = [f"{low:,}+" for low, _ in octaves]
    return make_plot(
        "Packs by attention pairs",
        [bar_trace(names, [packs for _, packs in octaves])],
        x="attention pairs",
        y="packs",
        xaxis={"type": "category"},
    )


def _losses(report: DatasetReport) -> list[Plot]:
    sources = [source for source in report["sources"] if any(source["tokens"]["lost"].values())]
    reasons = sorted({reason for source in sources for reason, count in source["tokens"]["lost"].items() if count})
    if not reasons:
        return []
    names = [escape_label(source["name"]) for source in sources]
    traces = [
        bar_trace(names, [source["tokens"]["lost"].get(reason, 0) for source in sources], reason) for reason in reasons
    ]
    return [
        make_plot(
            "Tokens lost by source", traces, y="tokens", barmode="stack", showlegend=True, xaxis={"type": "category"}
        )
    ]


def _overlaid(title: str, reports: list[DatasetReport]) -> Plot:
    traces = []
    for report in reports:
        edges, counts = log_classes(report["lengths"]["documents"]["histogram"])
        total = sum(counts) or 1
        traces.append(step_trace(edges, [c / total for c in counts], report["path"], fill="none"))
    return make_plot(
        title,
        traces,
        x="tokens",
        y="share of documents",
        xaxis={"type": "log"},
        yaxis={"tickformat": ".0%"},
        showlegend=True,
    )


def _overlaid_fill(reports: list[DatasetReport]) -> Plot:
    names = [escape_label(report["path"]) for report in reports]
    return make_plot(
        "Fill rate",
        [bar_trace(names, [report["fill"]["rate"] for report in reports])],
        yaxis={"tickformat": ".0%", "range": [0, 1]},
        xaxis={"type": "category"},
    )


def _pack(pack: DecodedPack) -> dict[str, Any]:
    segments = []
    for position, segment in enumerate(pack["segments"]):
        more = f"… {counted(segment['hidden_tokens'], 'more token')}" if segment["hidden_tokens"] else ""
        segments.append({"title": segment_title(segment, position), "runs": segment["runs"], "more": more})
    return {"title": pack_title(pack), "segments": segments}


def _plan_table(report: DatasetReport) -> Table:
    plan = {**report["plan"], "dataset_id": report["dataset_id"], "plan_id": report["plan_id"]}
    sources = plan.pop("sources")
    rows = [[key, _plain(value)] for key, value in sorted(plan.items())]
    rows += [
        [f"source {source['name']}", _plain({k: v for k, v in source.items() if k != "name"})] for source in sources
    ]
    rows += [[f"fact: {key}", _plain(value)] for key, value in sorted(report["build"].items())]
    return Table(["", ""], rows, text=True)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
