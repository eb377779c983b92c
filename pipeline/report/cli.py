"""Commands that show what a dataset or a run holds: flags to a call, print."""

from typing import Any

import click

from pipeline.cli import cache_options
from shards.settings import parse_mix


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="DATASET...", type=click.Path())
@click.option("--packs-per-step", type=click.IntRange(min=1), default=32, show_default=True, help="Packs of one step.")
@click.option("--model", help="Model directory, config.json or hub name, for costs and limits. [default: 1.24B shape]")
@click.option("--mix", type=parse_mix, metavar="TEXT", help="Weights as in pack train, such as web=0.7,code=0.3.")
@click.option("--rows", "rows", is_flag=True, help="Read every row: exact lengths, duplicates, used vocabulary.")
@click.option("--html", type=click.Path(dir_okay=False), help="Also write a page that opens offline.")
@click.option("--strict", is_flag=True, help="Exit with code 1 when there is any warning.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON (docs/report.md).")
@cache_options
def inspect(paths: tuple[str, ...], as_json: bool, html: str | None, strict: bool, mix: Any, **options: Any) -> None:
    """Report on datasets, or on training runs.

    Several datasets are set side by side; a directory that pack train wrote shows its curves with --html.

    \b
    Example:
      pack inspect data/corpus --html corpus.html
      pack inspect data/first data/second
      pack inspect runs/first runs/second --html runs.html
    """
    from pipeline.report.inspection import Inspection
    from pipeline.report.terminal import print_view

    inspection = Inspection(paths, mix=dict(mix or ()), **options)
    if html:
        inspection.write_page(html)
    if as_json:
        click.echo(inspection.json())
    else:
        print_view(inspection.view())
    if strict and any(report["warnings"] for report in inspection.reports):
        raise SystemExit(1)


@click.command()
@click.argument("dataset", type=click.Path())
@click.argument("row", type=int, default=0)
@click.option("--doc", help="Packs that hold this document: FILE:RECORD, window:record, or its doc_id.")
@click.option("--grep", help="Packs with this text inside one segment.")
@click.option("--scores", type=click.Path(), help="Scores by pack score: show the loss of each document.")
@click.option("--worst", is_flag=True, help="Packs with the documents of highest loss; with --scores.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=3, show_default=True, help="Most packs of --grep and --worst."
)
@click.option("--tokens", type=click.IntRange(min=1), help="Most tokens of a segment. [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a pack.")
@cache_options
def show(dataset: str, as_json: bool, **options: Any) -> None:
    """Decode packs: segments, targets, special tokens.

    \b
    Example:
      pack show data/corpus 17
      pack show data/corpus --doc 0:42
    """
    from pipeline.report.show import show_packs

    for line in show_packs(dataset, as_json=as_json, **options):
        click.echo(line)
