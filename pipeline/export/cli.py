"""Commands of the export room: flags to a config, one call, print."""

from __future__ import annotations

import json
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
    config = DatasetExportConfig(**given(flags))
    from pipeline.building.progress import RichProgress
    from pipeline.export.run import export_dataset

    with RichProgress(progress) as shown:
        result = export_dataset(config, shown)
    if as_json:
        click.echo(json.dumps(asdict(result)))
    else:
        size = f"{counted(result.files, 'file')}, {format_bytes(result.bytes)}"
        say(f"{result.path}: {size} ({counted(result.packs, 'pack')}, {counted(result.tokens, 'token')})")
