"""Training runs, from the `metrics.jsonl` that each leaves in its directory: one table, one page for one or several."""

import json
import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

from pipeline.formatting import format_count, format_share
from pipeline.report.html import COLOURS, Page, Plot, Section, Table, line_trace, make_plot
from shards.errors import PackError, counted

METRICS = "metrics.jsonl"
MAX_POINTS = 2000  # more than a screen can tell apart
# what is drawn, in this order, where a run has it: field, caption, unit
CURVES = (
    ("loss", "Training loss", "nats a target"),
    ("eval_loss", "Evaluation loss", "nats a target"),
    ("tokens_per_s", "Real tokens per second", "tokens/s"),
    ("mfu", "Model FLOPs utilisation", "share of peak"),
    ("data_wait", "Time that steps waited for data", "share of step"),
    ("memory_gib", "Highest memory use", "GiB"),
    ("grad_norm", "Gradient norm", ""),
    ("lr", "Learning rate", ""),
)

# figures of parts, drawn together below: prefix of the fields, caption; the part is a source or an evaluation dataset
FAMILIES = (("loss/", "Training loss by source"), ("eval_loss/", "Evaluation loss by dataset"))
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")  # one a run, where a colour is one part

AXES = {
    **{name: {"tickformat": ".1%", "rangemode": "tozero"} for name in ("mfu", "data_wait")},
    **{name: {"rangemode": "tozero"} for name in ("tokens_per_s", "memory_gib")},
    "lr": {"exponentformat": "e"},
}
# of the table: the figure of a summary, and how it is written
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "run": ("path", str),
    "steps": ("steps", format_count),
    "first loss": ("first_loss", "{:.4f}".format),
    "last loss": ("last_loss", "{:.4f}".format),
    "best eval": ("lowest_eval_loss", "{:.4f}".format),
    "tokens/s": ("tokens_per_s", "{:,.0f}".format),
    "MFU": ("mfu", format_share),
    "data wait": ("data_wait", format_share),
    "memory": ("memory_gib", "{:.1f} GiB".format),
}


class Run(NamedTuple):
    """What one run wrote."""

    path: str
    lines: list[dict[str, Any]]
    "One record of figures per logged step, `step` rising."


def is_run(path: str) -> bool:
    """Tell whether a directory is a training run's."""
    return (Path(path) / METRICS).is_file()


def read_run(path: str) -> Run:
    """Read a run's figures; a last line that a killed run left half written is not one.

    Raises:
        PackError: A line is no record of figures, or there is none at all.
    """
    file = Path(path) / METRICS
    raw = file.read_bytes().split(b"\n")
    records = []
    for position, line in enumerate(raw):
        if not line.strip():
            continue
        try:
            record = json.loads(line)  # not orjson: a run that diverged has NaN
        except ValueError as error:
            if position == len(raw) - 1:
                continue
            raise PackError(f"{file}, line {position + 1}: is not JSON. Remove the line, or train again.") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise PackError(f"{file}, line {position + 1}: has no step; expected what pack train writes.")
        records.append(record)
    if not records:
        raise PackError(f"{file}: holds no figures yet. Wait for the first logged step.")
    return Run(path, sorted(records, key=lambda record: record["step"]))


def curve_points(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one figure, finite values only, thinned to what a screen shows, the last kept."""
    points = [(step, float(value)) for step, value in figure_points(run, name) if math.isfinite(value)]
    stride = math.ceil(len(points) / MAX_POINTS) or 1
    thinned = points[(len(points) - 1) % stride :: stride] if points else []
    return [step for step, _ in thinned], [value for _, value in thinned]


def figure_points(run: Run, name: str) -> list[tuple[int, float]]:
    """Return step and value of every record that has this figure."""
    return [(record["step"], record[name]) for record in run.lines if isinstance(record.get(name), int | float)]


def summarize_run(run: Run) -> dict[str, Any]:
    """Return the figures of a run that one compares: last and lowest loss, and medians of the rest."""
    values = {name: [value for _, value in figure_points(run, name)] for name, _, _ in CURVES}
    losses, medians = values["loss"], ("tokens_per_s", "mfu", "data_wait")
    return {
        "path": run.path,
        "steps": run.lines[-1]["step"],
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "lowest_eval_loss": min(values["eval_loss"], default=None),
        **{name: median_high(values[name]) if values[name] else None for name in medians},
        "memory_gib": max(values["memory_gib"], default=None),
        **{
            field: {
                part: points[-1][1] for part in _parts([run], prefix) if (points := figure_points(run, prefix + part))
            }
            for field, prefix in (("last_loss_by_source", "loss/"), ("last_eval_loss_by_dataset", "eval_loss/"))
        },
    }


def runs_table(runs: list[Run]) -> Table:
    """Return the runs side by side."""
    rows = [
        ["–" if entry[name] is None else write(entry[name]) for name, write in COLUMNS.values()]
        for entry in map(summarize_run, runs)
    ]
    return Table(list(COLUMNS), rows)


def runs_page(runs: list[Run]) -> Page:
    """Return the page of one or several runs, one colour a run."""
    plots: list[Plot] = []
    for name, caption, unit in CURVES:
        traces = [
            line_trace(
                *curve_points(run, name),
                name=run.path,
                mode="lines+markers" if name == "eval_loss" else "lines",
                line={"color": COLOURS[k % len(COLOURS)]},
            )
            for k, run in enumerate(runs)
            if curve_points(run, name)[0]
        ]
        if traces:
            axis = AXES.get(name, {})
            plots.append(make_plot(caption, traces, x="step", y=unit, yaxis=axis, showlegend=len(runs) > 1))
    plots += [plot for prefix, caption in FAMILIES if (plot := _parts_plot(runs, prefix, caption))]
    first = summarize_run(runs[0])
    cards = (
        [{"value": f"{first['last_loss']:.4f}", "label": "last loss"}] if len(runs) == 1 and first["last_loss"] else []
    )
    title = runs[0].path if len(runs) == 1 else f"{len(runs)} training runs"
    subtitle = f"{counted(first['steps'], 'step')}" if len(runs) == 1 else ", ".join(run.path for run in runs)
    tables = [runs_table(runs), *parts_tables(runs)]
    sections = [Section("Curves", plots=plots), Section("Summary", tables=tables)]
    if samples := samples_table(runs):
        sections.append(Section("Samples", tables=[samples]))
    return Page(title, subtitle, cards, [], sections)


def _parts(runs: list[Run], prefix: str) -> list[str]:
    """Return the names that follow a prefix in the fields of any run, in the order in which they appear."""
    keys = dict.fromkeys(key for run in runs for record in run.lines for key in record if key.startswith(prefix))
    return [key.removeprefix(prefix) for key in keys]


def _parts_plot(runs: list[Run], prefix: str, caption: str) -> Plot | None:
    """Return one line for each part of each run, a colour a part; None where no run has parts."""
    traces = []
    for k, part in enumerate(_parts(runs, prefix)):
        for run, dash in zip(runs, cycle(DASHES), strict=False):
            steps, values = curve_points(run, prefix + part)
            if steps:
                name = part if len(runs) == 1 else f"{part}, {run.path}"
                line = {"color": COLOURS[k % len(COLOURS)], "dash": dash}
                mode = "lines+markers" if prefix == "eval_loss/" else "lines"
                traces.append(line_trace(steps, values, name=name, mode=mode, line=line))
    return make_plot(caption, traces, x="step", y="nats a target", showlegend=True) if traces else None


def samples_table(runs: list[Run]) -> Table | None:
    """Return what the models wrote, prompt by prompt, the newest last; None where no run has samples."""
    rows = [
        [str(record["step"]), sample["prompt"], sample["text"], run.path]
        for run in runs
        for record in run.lines
        for sample in record.get("samples") or ()
    ]
    rows.sort(key=lambda row: row[1])  # stable: the steps of a prompt stay in order
    if not rows:
        return None
    columns = ["step", "prompt", "text", "run"]
    return (
        Table(columns, rows, text=True) if len(runs) > 1 else Table(columns[:3], [row[:3] for row in rows], text=True)
    )


def parts_tables(runs: list[Run]) -> list[Table]:
    """Return the first and the last loss of every part of every run; a table for sources, one for evaluation sets."""
    tables = []
    for prefix, caption in FAMILIES:
        rows = []
        for part in _parts(runs, prefix):
            for run in runs:
                if values := [value for _, value in figure_points(run, prefix + part)]:
                    where = [part] if len(runs) == 1 else [part, run.path]
                    rows.append([*where, f"{values[0]:.4f}", f"{values[-1]:.4f}"])
        if rows:
            where = ["name"] if len(runs) == 1 else ["name", "run"]
            tables.append(Table([*where, "first loss", "last loss"], rows, title=caption))
    return tables
