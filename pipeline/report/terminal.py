"""Reports as a terminal shows them: wide or narrow, with or without colour, or piped into a file."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pipeline.formatting import LOSSES, duration, number, percent, reasons, size
from shards.errors import counted

Report = dict[str, Any]
LENGTHS = ("p1", "p5", "p25", "p50", "p75", "p95", "p99", "p99.9", "max")
UNBOUNDED = 10_000  # columns, more than any line needs


def stdout() -> Console:
    """Return stdout as a console as wide as the terminal; a pipe has room for whole lines."""
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNBOUNDED)


def show(*parts: RenderableType) -> None:
    """Print on stdout."""
    stdout().print(Group(*parts))


def grid(columns: list[str], rows: list[list[str]], title: str = "") -> RenderableType:
    """Return a table whose first column is text; it folds where the terminal is narrow."""
    return Group(Text(title, style="bold"), Grid(columns, rows)) if title else Grid(columns, rows)


class Grid:
    """A table that gives up space between columns, then breaks cells at spaces, before it breaks a number."""

    def __init__(self, columns: list[str], rows: list[list[str]]) -> None:
        self.columns, self.rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the table out in the room there is."""
        cells = list(zip(self.columns, *self.rows, strict=True))
        widths = [max(map(cell_len, column)) for column in cells]
        least = [max(cell_len(word) for cell in column for word in cell.split(" ")) for column in cells]
        gap = 2 if sum(least) + 2 * (len(least) - 1) <= options.max_width else 1
        while sum(widths) + gap * (len(widths) - 1) > options.max_width and widths != least:
            widest = max(range(len(widths)), key=lambda k: (widths[k] > least[k], widths[k]))
            widths[widest] -= 1
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        for position, (name, width) in enumerate(zip(self.columns, widths, strict=True)):
            justify: Literal["left", "right"] = "right" if position else "left"
            table.add_column(name, justify=justify, overflow="fold", header_style="dim", width=width)
        for row in self.rows:
            table.add_row(*[Text(cell) for cell in row])
        yield table


def pairs(rows: list[list[str]]) -> Table:
    """Return labels and what they stand for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(label), Text(value))
    return table


def dataset_view(report: Report) -> Group:
    """Return everything about one dataset."""
    parts: list[RenderableType] = [Text(report["path"], style="bold"), pairs(list(headline(report)))]
    parts += [grid(columns, rows, title) for title, columns, rows in tables(report)]
    parts += [Text(f"! {sentence}", style="yellow") for sentence in report["warnings"]]
    return _spaced(parts)


def _spaced(parts: list[RenderableType]) -> Group:
    return Group(*[line for part in parts for line in (part, Text())])


def comparison_view(reports: list[Report]) -> Group:
    """Return several datasets side by side, what differs marked."""
    paths = [report["path"] for report in reports]
    short = [path.rstrip("/").rpartition("/")[2] for path in paths]
    names = short if len(set(short)) == len(short) else paths  # whole paths leave little room for figures
    warned = [Text(f"! {report['path']}: {text}", style="yellow") for report in reports for text in report["warnings"]]
    return Group(grid(["", "", *names], list(side_by_side(reports))), *warned)


def side_by_side(reports: list[Report]) -> Iterator[list[str]]:
    """Yield a label, a mark where reports differ, and one value per report, for every line that any of them has."""
    columns = [dict(comparable(report)) for report in reports]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    for label in labels:
        values = [column.get(label, "–") for column in columns]
        yield [label, "≠" if len(set(values)) > 1 else "", *values]


def comparable(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what is worth setting side by side: the recipe, the headline, lengths and losses."""
    recipe = report["recipe"]
    yield "dataset", report["dataset_id"][:16]
    for key in ("seq_len", "packer", "seed"):
        yield key, str(recipe[key])
    yield "tokenizer", f"{recipe['tokenizer']['digest'][:12]}, {recipe['tokenizer']['vocab_size']:,} entries"
    for source in recipe["sources"]:
        yield f"source {source['name']}", f"{counted(source['files'], 'file')}, {size(source['bytes'])}"
        for key in ("kind", "train_on", "overlong"):
            yield f"source {source['name']}: {key}", source["records"].get(key) or "–"
    yield from ((label, value) for label, value in headline(report) if label not in ("dataset", "recipe"))
    for percentile in LENGTHS:
        yield f"document length {percentile}", number(report["lengths"]["documents"].get(percentile))
    for thing, lost in LOSSES:
        for reason, count in sorted(report[thing][lost].items()):
            yield f"{thing} lost: {reason}", number(count)


def headline(report: Report) -> Iterator[list[str]]:
    """Yield the label and value of every headline figure."""
    recipe, fill = report["recipe"], report["fill"]
    documents, tokens, targets = report["documents"], report["tokens"], report["targets"]
    yield ["dataset", f"{report['dataset_id'][:16]}  plan {report['plan_id'][:16]}"]
    vocabulary = recipe["tokenizer"]["vocab_size"]
    yield ["recipe", f"seq_len {recipe['seq_len']:,}, packer {recipe['packer']}, vocabulary of {vocabulary:,}"]
    yield ["documents", f"{documents['packed']:,} of {documents['read']:,} read" + _parts(documents)]
    yield ["segments", f"{report['segments']:,}"]
    yield ["packs", f"{report['packs']:,}, {report['segments_per_pack']['mean']:.2f} segments each"]
    yield ["tokens", f"{tokens['packed']:,} of {tokens['read']:,} read"]
    share = targets["packed"] / tokens["packed"] if tokens["packed"] else 0.0
    yield ["targets", f"{targets['packed']:,} ({percent(share)} of the tokens)"]
    fewest = f"the fewest possible, {counted(fill['min_packs'], 'pack')}"
    yield ["fill rate", f"{percent(fill['rate'])}; {percent(fill['above_min'])} above {fewest}"]
    steps = report["steps"]
    of = f"of {counted(steps['packs_per_step'], 'pack')}"
    yield ["steps per epoch", f"{steps['per_epoch']:,} {of}, {steps['left_over_packs']:,} left over"]
    yield ["on disk", f"{size(report['disk']['bytes'])} in {counted(report['disk']['shards'], 'shard')}"]
    yield from _built(report["build"], tokens["read"])


def _parts(documents: Report) -> str:
    figures = {key: documents[key] for key in ("split", "truncated")} | {"dropped": sum(documents["dropped"].values())}
    extra = ", ".join(f"{count:,} {key}" for key, count in figures.items() if count)
    return f" ({extra})" if extra else ""


def _built(build: Report, tokens: int) -> Iterator[list[str]]:
    for entry in build["tokenizer"]:
        yield ["tokenizer engine", f"{entry['engine']} {entry['version']}, guard: {entry['guard']['result']}"]
    seconds = build.get("seconds")
    if seconds:
        new = build.get("tokens_read", tokens)
        last = f" for the last {new:,} tokens" if new < tokens else ""
        speed = f"{new / seconds:,.0f} tokens/s, {counted(build['workers'], 'worker')}"
        yield ["built in", f"{duration(seconds)}{last}, {speed}"]


Rows = Iterator[list[str]]


def _feedings(report: Report) -> Rows:
    yield ["", "tokens computed", "padding", "attention pairs", "cost"]
    for way in report["feedings"]:
        figures = [number(way["slots"]), percent(way["padding"]), number(way["attention_pairs"])]
        yield [way["name"], *figures, f"{way['relative_cost']:.2f} x"]


def _losses(report: Report) -> Rows:
    yield ["source", "what", "read", "packed", "reasons"]
    for source in report["sources"]:
        for thing, lost in LOSSES:
            sheet = source[thing]
            why = reasons(sheet[lost])
            if why:
                yield [source["name"], thing, number(sheet["read"]), number(sheet["packed"]), why]


def _lengths(report: Report) -> Rows:
    yield ["", "mean", *LENGTHS]
    for kind in ("documents", "segments"):
        figures = report["lengths"][kind]
        if figures["count"]:
            yield [kind, f"{figures['mean']:,.1f}", *[number(figures[p]) for p in LENGTHS]]


def _stragglers(report: Report) -> Rows:
    entries = report["cost"]["straggler"]
    yield ["ranks", *(entries[0]["orders"] if entries else [])]
    for entry in entries:
        factors = [f"{factor:.3f}" if factor else "too few packs" for factor in entry["orders"].values()]
        yield [f"{entry['ranks']}", *factors]


def _sources(report: Report) -> Rows:
    yield ["source", "documents", "tokens", "share of tokens", "share of targets", "packs", "passes of the mix"]
    times = {entry["source"]: f"{entry['passes']:.2f}" for entry in report["mix"]}
    for source in report["sources"] if len(report["sources"]) > 1 or times else []:
        figures = [number(source[thing]["packed"]) for thing in ("documents", "tokens")]
        shares = [percent(source[f"share_of_{thing}"]) for thing in ("tokens", "targets")]
        yield [source["name"], *figures, *shares, number(source["packs"]), times.get(source["name"], "-")]


def _rows(report: Report) -> Rows:
    yield ["", "", "share"]
    if "deep" not in report:
        return
    figures, tokens, entries = report["deep"], report["tokens"]["packed"], report["recipe"]["tokenizer"]["vocab_size"]
    yield ["vocabulary used", number(figures["distinct_tokens"]), percent(figures["distinct_tokens"] / entries)]
    for name, text in (("duplicate_{}", "repeat another"), ("{}_without_target", "hold no target")):
        of_segments, of_tokens = figures[name.format("segments")], figures[name.format("tokens")]
        yield [f"segments that {text}", number(of_segments), percent(of_segments / max(1, report["segments"]))]
        yield ["their tokens", number(of_tokens), percent(of_tokens / max(1, tokens))]


def _longest(report: Report) -> Rows:
    yield ["source", "document", "tokens"]
    for source in report["sources"]:
        for entry in source["longest"][:3]:
            document = f"{entry['doc_id'] >> 32}:{entry['doc_id'] & 0xFFFFFFFF}"
            yield [source["name"], document, number(entry["tokens"])]


TABLES: dict[str, Callable[[Report], Rows]] = {
    "Padding avoided": _feedings,
    "Lost": _losses,
    "Lengths in tokens": _lengths,
    "Slowest rank against the mean": _stragglers,
    "Sources": _sources,
    "Longest documents, above seq_len": _longest,
    "Read from the rows": _rows,
}


def tables(report: Report) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, columns and rows of every table that has rows; terminal and page show the same ones."""
    for title, make in TABLES.items():
        columns, *rows = make(report)
        if rows:
            yield title, columns, rows


def plan_view(plan: Report) -> Group:
    """Return what a plan found out."""
    sample, corpus, build = plan["sample"], plan["corpus"], plan["build"]
    seen = "everything" if sample["whole"] else f"{counted(sample['documents'], 'document')}, {size(sample['bytes'])}"
    of = "" if sample["whole"] or not sample["corpus_bytes"] else f" of {size(sample['corpus_bytes'])}"
    half = corpus["tokens_plus_minus"]
    spread = " ± unknown" if half is None else f" ± {half:,}" if half else ""
    about = "" if sample["whole"] else "about "
    workers = counted(build["workers"], "worker")
    rows = [
        ["seen", f"{seen}{of} in {duration(sample['seconds'])}"],
        ["corpus", f"{about}{counted(corpus['documents'], 'document')}, {corpus['tokens']:,}{spread} tokens"],
        ["estimated build", f"{duration(build['seconds'])} with {workers}, {size(build['disk_bytes'])} on disk"],
    ]
    rows += (
        [["left out", f"{sample['rejected']:,} unreadable, {sample['empty']:,} empty"]]
        if sample["rejected"] + sample["empty"]
        else []
    )
    best = plan["recommendation"]
    advice = f"--seq-len {best['seq_len']}: {best['reason']}" if best["seq_len"] else best["reason"]
    seq_lens = ["seq_len", "packs", "full", "documents cut", "tokens lost", "cost a token"]
    packers = ["seq_len", *dict.fromkeys(row["packer"] for row in plan["outcomes"])]
    parts: list[RenderableType] = [
        pairs(rows),
        *([Text(_rejection(sample), style="yellow")] if sample["rejected"] else []),
        grid(seq_lens, list(_by_seq_len(plan)), "With the default packer"),
        grid(packers, list(_by_packer(plan)), "How full each packer fills packs"),
        Text(f"cost: training FLOPs a token against the cheapest row, {plan['model']}", style="dim"),
        Text(f"→ {advice}", style="bold"),
    ]
    return _spaced(parts)


def _rejection(sample: Report) -> str:
    """Say why records are unreadable, and what a build does about it."""
    share = sample["rejected"] / (sample["rejected"] + sample["empty"] + sample["documents"])
    return (
        f"! {sample['first_rejected']}. A build stops there unless --on-error skip leaves such records out: "
        f"{percent(share)} of those seen, where --max-rejected allows 1% if it is not raised."
    )


def _by_seq_len(plan: Report) -> Rows:
    for row in plan["outcomes"]:
        if row["packer"] == "auto":
            spread = f" ± {percent(row['documents_cut_plus_minus'])}" if row["documents_cut_plus_minus"] else ""
            figures = [percent(row["fill"]), percent(row["documents_cut"]) + spread, percent(row["tokens_lost"])]
            yield [f"{row['seq_len']:,}", number(row["packs"]), *figures, f"{row['relative_cost']:.2f} x"]


def _by_packer(plan: Report) -> Rows:
    for seq_len in dict.fromkeys(row["seq_len"] for row in plan["outcomes"]):
        yield [f"{seq_len:,}", *[percent(row["fill"]) for row in plan["outcomes"] if row["seq_len"] == seq_len]]
