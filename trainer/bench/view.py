"""The figures of `pack bench` on a terminal and as a page; what they mean is said in `trainer/bench/compare.py`."""

from typing import Any

from pipeline.formatting import format_bytes, format_share
from pipeline.report.html import Page, Section, Table, bar_trace, make_plot, write_page
from pipeline.report.terminal import make_table, open_stdout, safe_text
from shards.errors import counted

WIDE_ENOUGH = 140  # columns of a terminal for the whole table
Result = dict[str, Any]

COLUMNS = (
    "strategy", "tokens/step", "padding", "s/step", "spread", "tokens/s", "speed-up", "memory", "data", "loss",
    "TFLOP/s", "MFU",
)  # fmt: skip
NARROW = ("strategy", "padding", "s/step", "tokens/s", "speed-up", "memory", "loss")


def row_cells(row: Result, wrong: dict[str, float]) -> list[str]:
    """Return a row of the table, for people; speed-up is against padded-longest, spread is quartile to quartile."""
    if "failed" in row:
        return [row["strategy"], *["–"] * (len(COLUMNS) - 1)]
    low, high = row["step_s"]["quartiles"]
    return [
        row["strategy"],
        f"{row['tokens_per_step']:,.0f}",
        format_share(row["padding"]),
        f"{row['step_s']['median']:.3g}",
        format_share((high - low) / row["step_s"]["median"]),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['speedup']:.2f} x" if row["speedup"] else "–",
        format_bytes(row["peak_bytes"]) if row["peak_bytes"] else "–",
        format_share(row["data_share"]),
        f"{row['loss']:.4f}" + (" ≠" if row["strategy"] in wrong else ""),
        f"{row['tflops_per_s']:.3g}",
        format_share(row["mfu"]) if row["mfu"] else "–",
    ]


def figures_table(result: Result, width: int = WIDE_ENOUGH) -> Table:
    """Return the table without columns that nobody fills; where there is little room, with the foremost ones."""
    rows = [row_cells(row, result["disagreements"]) for row in result["rows"]]
    shown = [
        k for k, name in enumerate(COLUMNS)
        if any(row[k] != "–" for row in rows) and (width >= WIDE_ENOUGH or name in NARROW)
    ]  # fmt: skip
    return Table([COLUMNS[k] for k in shown], [[row[k] for k in shown] for row in rows])


def describe_result(result: Result) -> str:
    """Return what was run, on what, in one line."""
    steps, sizes, found = result["steps"], result["settings"], result["machine"]
    return (
        f"{counted(steps['documents'], 'document')}, {counted(steps['tokens'], 'token')} of {result['data']} "
        f"in {counted(steps['number'], 'step')}; "
        f"{result['parameters'] / 1e6:,.1f}M parameters, {sizes['dtype']}; padded batches of {sizes['batch']}, "
        f"others of {sizes['tokens_per_batch']:,} tokens; {found['name']}, {counted(found['threads'], 'thread')}, "
        f"torch {found['torch']}"
    )


def remarks(result: Result) -> list[str]:
    """Return the sentences under the table, losses that disagree first."""
    first = next((row["strategy"] for row in result["rows"] if "loss" in row), "")
    wrong = [
        f"LOSSES DISAGREE: {name} is up to {off:.1e} off {first} on the same documents; it trains something else"
        for name, off in result["disagreements"].items()
    ]
    failures = [f"{row['strategy']}: {row['failed']}" for row in result["rows"] if "failed" in row]
    return [*wrong, *failures, *result["notes"]]


def print_result(result: Result) -> None:
    """Print the table and what there is to say about it; a pipe gets all columns."""
    console = open_stdout()
    table = figures_table(result, console.width)
    console.print(safe_text(describe_result(result), "dim"), soft_wrap=True)
    console.print(make_table(table.columns, table.rows))
    loud = len(result["disagreements"])
    for k, text in enumerate(remarks(result)):
        console.print(safe_text(f"! {text}", "bold red" if k < loud else "yellow"), soft_wrap=True)


def make_page(result: Result) -> Page:
    """Return the HTML page."""
    run = [row for row in result["rows"] if "loss" in row]
    names = [row["strategy"] for row in run]
    best = max(run, key=lambda row: row["tokens_per_s"], default=None)
    cards = []
    if best:
        cards = [
            {"value": f"{best['tokens_per_s']:,.0f}", "label": f"real tokens/s, {best['strategy']}"},
            {"value": f"{best['speedup']:.2f} x", "label": "against padded-longest"} if best["speedup"] else {},
            {"value": format_share(max(row["padding"] for row in run)), "label": "padding at worst"},
        ]
    plots = [
        make_plot("Real tokens per second", [bar_trace(names, [row["tokens_per_s"] for row in run])], y="tokens/s"),
        make_plot("Padding", [bar_trace(names, [row["padding"] for row in run])], yaxis={"tickformat": ".0%"}),
        make_plot("Peak memory", [bar_trace(names, [(row["peak_bytes"] or 0) / 2**30 for row in run])], y="GiB"),
    ]
    sections = [
        Section("Speed", plots=plots),
        Section("Figures", describe_result(result), tables=[figures_table(result)]),
    ]
    return Page("pack bench", result["machine"]["name"], [card for card in cards if card], remarks(result), sections)


def write_result_page(result: Result, file: str) -> None:
    """Write the HTML page.

    Raises:
        PackError: The file cannot be written.
    """
    write_page(make_page(result), file)
