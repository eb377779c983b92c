"""Reports as a terminal shows them: wide or narrow, with or without colour, or piped into a file."""

import os
import sys
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.formatting import balances, format_bytes, format_count, format_duration, format_reasons, format_share
from pipeline.report.records import DatasetReport
from shards.counts import DocumentCounts
from shards.errors import counted
from shards.manifest import Facts
from shards.text import printable

LENGTHS = ("p1", "p5", "p25", "p50", "p75", "p95", "p99", "p99.9", "max")
UNBOUNDED = 10_000  # columns, more than any line needs


def open_stdout() -> Console:
    """Return stdout as a console as wide as the terminal; a pipe has room for whole lines."""
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNBOUNDED)


def print_view(*parts: RenderableType) -> None:
    """Print on stdout."""
    open_stdout().print(Group(*parts))


def safe_text(text: str, style: str = "") -> Text:
    """Return text, names of strangers and all, in one line that a terminal can show and will not obey."""
    return Text(printable(text), style=style)


def make_table(columns: list[str], rows: list[list[str]], title: str = "") -> RenderableType:
    """Return a table whose first column is text and the others figures; cells fold where the terminal is narrow."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    for position, name in enumerate(columns):
        table.add_column(safe_text(name), justify="right" if position else "left", overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*[safe_text(cell) for cell in row])
    return Group(Text(title, style="bold"), table) if title else table


def label_table(rows: list[list[str]]) -> Table:
    """Return labels and what they stand for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(safe_text(label), safe_text(value))
    return table


def dataset_view(report: DatasetReport) -> Group:
    """Return everything about one dataset."""
    parts: list[RenderableType] = [safe_text(report["path"], "bold"), label_table(list(headline(report)))]
    parts += [make_table(columns, rows, title) for title, columns, rows in tables(report)]
    parts += [safe_text(f"! {sentence}", "yellow") for sentence in report["warnings"]]
    return join_with_blank_lines(parts)


def join_with_blank_lines(parts: list[RenderableType]) -> Group:
    """Return parts with a blank line after each."""
    return Group(*[line for part in parts for line in (part, Text())])


def comparison_view(reports: list[DatasetReport]) -> Group:
    """Return several datasets side by side, what differs marked."""
    paths = [report["path"] for report in reports]
    short = [path.rstrip("/").rpartition("/")[2] for path in paths]
    names = short if len(set(short)) == len(short) else paths  # whole paths leave little room for figures
    warned = [safe_text(f"! {report['path']}: {text}", "yellow") for report in reports for text in report["warnings"]]
    return Group(make_table(["", "", *names], list(side_by_side(reports))), *warned)


def side_by_side(reports: list[DatasetReport]) -> Iterator[list[str]]:
    """Yield a label, a mark where reports differ, and one value per report, for every line that any of them has."""
    columns = [dict(comparable(report)) for report in reports]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    for label in labels:
        values = [column.get(label, "–") for column in columns]
        yield [label, "≠" if len(set(values)) > 1 else "", *values]


def comparable(report: DatasetReport) -> Iterator[tuple[str, str]]:
    """Yield what is worth setting side by side: the plan, the headline, lengths and losses."""
    plan = report["plan"]
    yield "dataset", report["dataset_id"][:16]
    for key in ("seq_len", "packer", "seed"):
        yield key, str(plan[key])
    yield "tokenizer", f"{plan['tokenizer']['digest'][:12]}, {plan['tokenizer']['vocab_size']:,} entries"
    for source in plan["sources"]:
        yield f"source {source['name']}", f"{counted(source['files'], 'file')}, {format_bytes(source['bytes'])}"
        for key in ("kind", "train_on", "overlong"):
            yield f"source {source['name']}: {key}", source["records"].get(key) or "–"
    yield from ((label, value) for label, value in headline(report) if label not in ("dataset", "plan"))
    for percentile in LENGTHS:
        yield f"document length {percentile}", format_count(report["lengths"]["documents"].get(percentile))
    for sheet in balances(report):
        for reason, count in sorted(sheet.lost.items()):
            yield f"{sheet.thing} lost: {reason}", format_count(count)


def headline(report: DatasetReport) -> Iterator[list[str]]:
    """Yield the label and value of every headline figure."""
    plan, fill = report["plan"], report["fill"]
    documents, tokens, targets = report["documents"], report["tokens"], report["targets"]
    yield ["dataset", f"{report['dataset_id'][:16]}  plan {report['plan_id'][:16]}"]
    vocabulary = plan["tokenizer"]["vocab_size"]
    yield ["plan", f"seq_len {plan['seq_len']:,}, packer {plan['packer']}, vocabulary of {vocabulary:,}"]
    yield ["documents", f"{documents['packed']:,} of {documents['read']:,} read" + _parts(documents)]
    yield ["segments", f"{report['segments']:,}"]
    yield ["packs", f"{report['packs']:,}, {report['segments_per_pack']['mean']:.2f} segments each"]
    yield ["tokens", f"{tokens['packed']:,} of {tokens['read']:,} read"]
    share = targets["packed"] / tokens["packed"] if tokens["packed"] else 0.0
    yield ["targets", f"{targets['packed']:,} ({format_share(share)} of the tokens)"]
    fewest = f"the fewest possible, {counted(fill['min_packs'], 'pack')}"
    above = f"{format_share(fill['above_min'])} above {fewest}"
    yield ["fill rate", f"{format_share(fill['rate'])}; {above}{_lost_to_windows(report)}"]
    steps = report["steps"]
    of = f"of {counted(steps['packs_per_step'], 'pack')}"
    yield ["steps per epoch", f"{steps['per_epoch']:,} {of}, {steps['left_over_packs']:,} left over"]
    blocks = report["block_shuffle"]
    if blocks["meeting_share"] < 1:
        pairs = f"{format_share(blocks['meeting_share'])} of the pairs of packs can meet in a step"
        mixed = ", ".join(f"{name} {format_share(share)}" for name, share in blocks["by_source"].items())
        several = f"; mixed, by source: {mixed}" if len(blocks["by_source"]) > 1 else ""
        yield ["block-shuffled", f"{pairs} of an epoch, in blocks of {blocks['block_shards']:,} shards{several}"]
    yield ["on disk", f"{format_bytes(report['disk']['bytes'])} in {counted(report['disk']['shards'], 'shard')}"]
    yield from _built(report["build"], tokens["read"])


def _lost_to_windows(report: DatasetReport) -> str:
    fill, windows = report["fill"], report["disk"]["shards"]
    lost = fill["min_packs_of_windows"] / fill["min_packs"] - 1.0 if fill["min_packs"] else 0.0
    return f" ({format_share(lost)} since {windows:,} windows are packed alone)" if windows > 1 and lost > 0.001 else ""


def _parts(documents: DocumentCounts) -> str:
    figures = {"split": documents["split"], "truncated": documents["truncated"]}
    figures["dropped"] = sum(documents["dropped"].values())
    extra = ", ".join(f"{count:,} {key}" for key, count in figures.items() if count)
    return f" ({extra})" if extra else ""


def _built(build: Facts, tokens: int) -> Iterator[list[str]]:
    for entry in build.get("tokenizer", []):
        yield ["tokenizer engine", f"{entry['engine']} {entry['version']}, guard: {entry['guard']['result']}"]
    seconds = build.get("seconds")
    if seconds:
        new = build.get("tokens_read", tokens)
        last = f" for the last {new:,} tokens" if new < tokens else ""
        speed = f"{new / seconds:,.0f} tokens/s, {counted(build.get('workers', 1), 'worker')}"
        yield ["built in", f"{format_duration(seconds)}{last}, {speed}"]


TableRows = Iterator[list[str]]


def _feedings(report: DatasetReport) -> TableRows:
    yield ["", "tokens computed", "padding", "attention pairs", "cost"]
    for way in report["feedings"]:
        figures = [format_count(way["slots"]), format_share(way["padding"]), format_count(way["attention_pairs"])]
        yield [way["name"], *figures, f"{way['relative_cost']:.2f} x"]


def _losses(report: DatasetReport) -> TableRows:
    yield ["source", "what", "read", "packed", "reasons"]
    for source in report["sources"]:
        for sheet in balances(source):
            why = format_reasons(sheet.lost)
            if why:
                yield [source["name"], sheet.thing, format_count(sheet.read), format_count(sheet.packed), why]


def _lengths(report: DatasetReport) -> TableRows:
    yield ["", "mean", *LENGTHS]
    for kind in ("documents", "segments"):
        figures = report["lengths"][kind]
        if figures["count"]:
            yield [kind, f"{figures['mean']:,.1f}", *[format_count(figures[p]) for p in LENGTHS]]


def _stragglers(report: DatasetReport) -> TableRows:
    entries = report["cost"]["straggler"]
    yield ["ranks", *(entries[0]["orders"] if entries else [])]
    for entry in entries:
        factors = [f"{factor:.3f}" if factor else "too few packs" for factor in entry["orders"].values()]
        yield [f"{entry['ranks']}", *factors]


def _sources(report: DatasetReport) -> TableRows:
    yield ["source", "documents", "tokens", "share of tokens", "share of targets", "packs", "passes of the mix"]
    times = {entry["source"]: f"{entry['passes']:.2f}" for entry in report["mix"]}
    for source in report["sources"] if len(report["sources"]) > 1 or times else []:
        figures = [format_count(source["documents"]["packed"]), format_count(source["tokens"]["packed"])]
        shares = [format_share(source["share_of_tokens"]), format_share(source["share_of_targets"])]
        yield [source["name"], *figures, *shares, format_count(source["packs"]), times.get(source["name"], "-")]


def _row_statistics(report: DatasetReport) -> TableRows:
    yield ["", "", "share"]
    if "row_statistics" not in report:
        return
    figures, segments, tokens = report["row_statistics"], report["segments"], report["tokens"]["packed"]
    entries = report["plan"]["tokenizer"]["vocab_size"]
    for text, count, total in (
        ("vocabulary used", figures["distinct_tokens"], entries),
        ("segments that repeat another", figures["duplicate_segments"], segments),
        ("their tokens", figures["duplicate_tokens"], tokens),
        ("segments that hold no target", figures["segments_without_target"], segments),
        ("their tokens", figures["tokens_without_target"], tokens),
    ):
        yield [text, format_count(count), format_share(count / max(1, total))]


def _longest(report: DatasetReport) -> TableRows:
    yield ["source", "document", "tokens"]
    for source in report["sources"]:
        for entry in source["longest"][:3]:
            document = f"{entry['doc_id'] >> 32}:{entry['doc_id'] & 0xFFFFFFFF}"
            yield [source["name"], document, format_count(entry["tokens"])]


TABLES: dict[str, Callable[[DatasetReport], TableRows]] = {
    "Padding avoided": _feedings,
    "Lost": _losses,
    "Lengths in tokens": _lengths,
    "Slowest rank against the mean": _stragglers,
    "Sources": _sources,
    "Longest documents, above seq_len": _longest,
    "Read from the rows": _row_statistics,
}


def tables(report: DatasetReport) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, columns and rows of every table that has rows; terminal and page show the same ones."""
    for title, make in TABLES.items():
        columns, *rows = make(report)
        if rows:
            yield title, columns, rows
