"""Commands about the documents of a run and their losses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from pipeline.cli import given, options_of, say
from shards.quiet import quiet
from trainer.cli import wait_idly
from trainer.documents.config import ScoreConfig


@click.command()
@click.argument("run", type=click.Path())
@click.option("--step", type=int, help="Step of the run, counted from 1 as in its metrics: list the documents it saw.")
@click.option(
    "--doc", metavar="FILE:RECORD", help="Document: list the steps that see it. Also window:record or doc_id."
)
@click.option("--dataset", type=click.Path(), help="Dataset, where it has moved. [default: the run's]")
@click.option("--scores", type=click.Path(), help="Scores of the dataset by pack score: show losses.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Most lines shown.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def trace(
    run: str, step: int | None, doc: str | None, dataset: str | None, scores: str | None, limit: int, as_json: bool
) -> None:
    """Say which documents a step of a run saw, or which steps saw a document.

    Nothing is logged for it while training: the order follows from dataset, settings and seed.

    \b
    Example:
      pack trace runs/first --step 340
      pack trace runs/first --doc corpus.jsonl:812
    """
    if (step is None) == (doc is None):
        raise click.UsageError("give one of --step and --doc")
    from trainer.documents.trace import RunTrace
    from trainer.documents.view import print_document, print_step

    traced = RunTrace(run, dataset=dataset, scores=scores)
    if step is not None:
        seen = traced.step(step)
        if as_json:
            say(json.dumps(seen))
        else:
            print_step(seen, limit)
        return
    documents = traced.document(str(doc))
    if as_json:
        say(json.dumps(documents))
        return
    for document in documents:
        print_document(document, traced.steps_taken, limit)


@click.command()
@click.argument("dataset", type=click.Path())
@options_of(ScoreConfig, omit=("dataset",))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def score(as_json: bool, **flags: Any) -> None:
    """Write the loss of every document under a model.

    Packed, so it takes as long as an evaluation; under torchrun all processes share the work. pack show --scores, pack
    trace --scores and pack repack --drop take the file.

    \b
    Example:
      pack score data/corpus --model runs/first/model --out scores.parquet
      pack show data/corpus --scores scores.parquet --worst
    """
    config = ScoreConfig(**given(flags))
    wait_idly()
    from trainer import distributed
    from trainer.documents.score import score as run_score
    from trainer.documents.score import summary_of, write_table
    from trainer.documents.view import print_summary

    world = distributed.start(config.device)
    try:
        with quiet(), _progress(world.is_main) as on_progress:
            result = run_score(config, world, on_progress)
        if not world.is_main:
            return
        write_table(result.table, config.out, overwrite=config.overwrite)
    finally:
        distributed.stop(world)
    for note in result.notes:
        say(note, err=True)
    summary = summary_of(result)
    if as_json:
        say(json.dumps(summary))
    else:
        print_summary(summary, str(config.out))


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show how many tokens are scored, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("scoring"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("scoring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
