"""The page of one or several datasets: the report's figures as plots, its tables, a few packs, the recipe."""

from typing import Any

import numpy as np
import orjson

from pipeline.formatting import percent, size
from pipeline.report.html import Page, Plot, Section, Table, bars, label, lines, mark, plot, steps
from pipeline.report.show import Pack, segment_title
from pipeline.report.show import title as pack_title
from pipeline.report.terminal import side_by_side, tables
from shards.errors import counted

Report = dict[str, Any]
MOST_BARS = 60  # segments per pack beyond this are drawn as classes


def dataset_page(report: Report, packs: list[Pack]) -> Page:
    """Return the page of one dataset.

    Args:
        report: From `report.inspect`, with `fill_by_seq_len` where it was asked for.
        packs: Sample packs, from `show.describe`.
    """
    recipe = report["recipe"]
    dearest = max((way["relative_cost"] for way in report["feedings"]), default=1.0)
    cards = [
        {"value": percent(report["fill"]["rate"]), "label": "fill rate"},
        {"value": percent(report["fill"]["above_min"]), "label": "above the fewest possible packs"},
        _counted(report["packs"], "pack", f" of up to {recipe['seq_len']:,} tokens"),
        _counted(report["tokens"]["packed"], "token"),
        _counted(report["targets"]["packed"], "target"),
        _counted(report["documents"]["packed"], "document"),
        {"value": f"{dearest:.1f} x", "label": "cost of padding to seq_len"},
        {"value": size(report["disk"]["bytes"]), "label": f"in {counted(report['disk']['shards'], 'shard')}"},
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
        Section("Recipe", tables=[_recipe(report)]),
    ]
    kept = [section for section in sections if section.plots or section.tables or section.packs]
    return Page(report["path"], f"shardpack dataset {report['dataset_id'][:16]}", cards, report["warnings"], kept)


def _counted(number: int, noun: str, more: str = "") -> dict[str, str]:
    value, label = counted(number, noun).split(" ", 1)
    return {"value": value, "label": label + more}


def comparison_page(reports: list[Report]) -> Page:
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


def _fill(report: Report) -> Plot:
    width = 1 / 50
    edges = [(edge / report["recipe"]["seq_len"] + width / 2) for edge, _ in report["fill"]["histogram"]]
    counts = [packs for _, packs in report["fill"]["histogram"]]
    axis = {"tickformat": ".0%", "range": [0, 1]}
    return plot(
        "How full packs are",
        [bars(edges, counts, width=width)],
        x="tokens / seq_len",
        y="packs",
        xaxis=axis,
        bargap=0.05,
    )


def _segments_per_pack(report: Report) -> Plot:
    table = np.array(report["segments_per_pack"]["histogram"], np.int64).reshape(-1, 2)
    width = max(1, -(-int(table[:, 0].max(initial=1)) // MOST_BARS))
    counts = np.bincount(table[:, 0] // width, weights=table[:, 1]) if len(table) else np.zeros(0)
    kept = np.flatnonzero(counts)
    centres = (kept * width + (width - 1) / 2).tolist()
    trace = bars(centres, counts[kept].tolist(), width=0.9 * width)
    axis = {"dtick": 1} if width == 1 and len(kept) < 12 else {}
    return plot("Segments in a pack", [trace], x="segments", y="packs", xaxis=axis)


def _fill_by_seq_len(report: Report) -> list[Plot]:
    entries = report.get("fill_by_seq_len")
    if not entries:
        return []
    x = [entry["seq_len"] for entry in entries]
    traces = [
        lines(x, [entry["fill"] for entry in entries], "fill rate", mode="lines+markers"),
        lines(x, [entry["documents_cut"] for entry in entries], "documents cut", mode="lines+markers"),
    ]
    ticks = {"type": "log", "tickvals": x, "ticktext": [f"{n // 1024}k" if n >= 1024 else str(n) for n in x]}
    return [
        plot(
            "Fill and cuts at other seq_len",
            traces,
            x="seq_len",
            xaxis=ticks,
            yaxis={"tickformat": ".0%", "range": [0, 1.02]},
            shapes=[mark(report["recipe"]["seq_len"])],
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


def _lengths(report: Report) -> Plot:
    traces = [steps(*log_classes(report["lengths"][kind]["histogram"]), kind) for kind in ("documents", "segments")]
    return plot(
        "Length distribution",
        traces,
        x="tokens",
        y="number",
        xaxis={"type": "log"},
        shapes=[mark(report["recipe"]["seq_len"])],
        showlegend=True,
    )


def _feedings(report: Report) -> Plot:
    names = [way["name"] for way in report["feedings"]]
    costs = [way["relative_cost"] for way in report["feedings"]]
    trace = bars(costs, names, orientation="h", text=[f"{c:.2f} x" for c in costs], textposition="auto")
    return plot(
        f"Cost of feeding the same segments, {names[0]} = 1",
        [trace],
        x="training FLOPs",
        yaxis={"autorange": "reversed"},
    )


def _costs(report: Report) -> Plot:
    octaves = report["cost"]["octaves"]
    names = [f"{low:,}+" for low, _ in octaves]
    return plot(
        "Packs by attention pairs",
        [bars(names, [packs for _, packs in octaves])],
        x="attention pairs",
        y="packs",
        xaxis={"type": "category"},
    )


def _losses(report: Report) -> list[Plot]:
    sources = [source for source in report["sources"] if any(source["tokens"]["lost"].values())]
    reasons = sorted({reason for source in sources for reason, count in source["tokens"]["lost"].items() if count})
    if not reasons:
        return []
    names = [label(source["name"]) for source in sources]
    traces = [
        bars(names, [source["tokens"]["lost"].get(reason, 0) for source in sources], reason) for reason in reasons
    ]
    return [
        plot("Tokens lost by source", traces, y="tokens", barmode="stack", showlegend=True, xaxis={"type": "category"})
    ]


def _overlaid(title: str, reports: list[Report]) -> Plot:
    traces = []
    for report in reports:
        edges, counts = log_classes(report["lengths"]["documents"]["histogram"])
        total = sum(counts) or 1
        traces.append(steps(edges, [c / total for c in counts], report["path"], fill="none"))
    return plot(
        title,
        traces,
        x="tokens",
        y="share of documents",
        xaxis={"type": "log"},
        yaxis={"tickformat": ".0%"},
        showlegend=True,
    )


def _overlaid_fill(reports: list[Report]) -> Plot:
    names = [label(report["path"]) for report in reports]
    return plot(
        "Fill rate",
        [bars(names, [report["fill"]["rate"] for report in reports])],
        yaxis={"tickformat": ".0%", "range": [0, 1]},
        xaxis={"type": "category"},
    )


def _pack(pack: Pack) -> dict[str, Any]:
    segments = []
    for position, segment in enumerate(pack["segments"]):
        more = f"… {counted(segment['hidden_tokens'], 'more token')}" if segment["hidden_tokens"] else ""
        segments.append({"title": segment_title(segment, position), "runs": segment["runs"], "more": more})
    return {"title": pack_title(pack), "segments": segments}


def _recipe(report: Report) -> Table:
    recipe = {**report["recipe"], "dataset_id": report["dataset_id"], "plan_id": report["plan_id"]}
    sources = recipe.pop("sources")
    rows = [[key, _plain(value)] for key, value in sorted(recipe.items())]
    rows += [
        [f"source {source['name']}", _plain({k: v for k, v in source.items() if k != "name"})] for source in sources
    ]
    rows += [[f"fact: {key}", _plain(value)] for key, value in sorted(report["build"].items())]
    return Table(["", ""], rows, text=True)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
