"""Commands of the export room: flags to a config, one call, print."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import click

from pipeline.cli import given, options_of, say
from pipeline.export.config import DatasetExportConfig
from pipeline.formatting import format_bytes
from shards.errors import counted


@click.command()
@click.argument("dataset", type=click.Path())
@options_of(DatasetExportConfig, omit=("dataset",))
@click.option("--progress/--no-progress", default=None, help="Progress on stderr. [default: on a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export(as_json: bool, progress: bool | None, **flags: Any) -> None:
    """Write a dataset as other trainers read it.

    megatron and jsonl hold documents, joined from their segments; the others hold packs. See docs/export.md.

    \b
    Example:
      pack export data/corpus --to megatron --out data/megatron
      pack export data/chats --to parquet --out data/parquet
    """
    chosen = given(flags)
    if "out" in chosen:
        chosen["out"] = os.path.expanduser(chosen["out"])  # noqa: PTH111  # a shell leaves --out=~/data
    config = DatasetExportConfig(**chosen)
    from pipeline.building.progress import RichProgress
    from pipeline.export.run import export_dataset

    with RichProgress(progress) as shown:
        result = export_dataset(config, shown)
    if as_json:
        click.echo(json.dumps(asdict(result)))
    else:
        size = f"{counted(result.files, 'file')}, {format_bytes(result.bytes)}"
        say(f"{result.path}: {size} ({counted(result.packs, 'pack')}, {counted(result.tokens, 'token')})")


@click.command()
@click.argument("dataset", type=click.Path())
@click.argument("url", metavar="HF_URL")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--overwrite", is_flag=True, help="Replace another dataset there.")
@click.option("--json", "as_json", is_flag=True, help="Print what was pushed as JSON.")
def push(dataset: str, url: str, private: bool, overwrite: bool, as_json: bool) -> None:
    """Upload a dataset to the Hugging Face hub.

    One commit with all files and a card. The manifest says on which machine and when the dataset was built, the plan
    what its sources are called; both become public with it.

    \b
    Example:
      pack push data/corpus hf://datasets/me/corpus-packed --private
    """
    from pipeline.export.hub import push as run
    from shards.quiet import quiet

    with quiet():
        result = run(dataset, url, private=private, overwrite=overwrite)
    _print_transfer(result, as_json)


@click.command()
@click.argument("url", metavar="HF_URL")
@click.argument("out", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print what was pulled as JSON.")
def pull(url: str, out: str, as_json: bool) -> None:
    """Download a dataset from the Hugging Face hub.

    Every file is checked against the manifest before the directory takes its place.

    \b
    Example:
      pack pull hf://datasets/me/corpus-packed data/corpus
      pack pull hf://datasets/me/corpus-packed@v1 data/corpus
    """
    from pipeline.export.hub import pull as run
    from shards.quiet import quiet

    with quiet():
        result = run(url, out)
    _print_transfer(result, as_json)


def _print_transfer(result: Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(result)))
        return
    there = ", was there already" if result.unchanged else ""
    size = f"{counted(result.files, 'file')}, {format_bytes(result.bytes)}"
    say(f"{result.path}: dataset {result.dataset_id[:12]}, {size}{there}")
