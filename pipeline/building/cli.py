"""Commands that make datasets and prove them: flags to a config, one call, print."""

import json
import os
from typing import Any

import click

from pipeline.cli import (
    attach_record_options,
    cache_options,
    options_of,
    record_options,
    say,
    settings_file,
    usable_cores,
)
from pipeline.config import BuildConfig, RecordOptions, RepackConfig
from pipeline.recipe import refuse_idle, source_options
from shards.errors import counted
from shards.settings import settings_of
from shards.text import printable

BEFORE_RECORDS = ("out", "tokenizer", "seq_len")  # what --help shows before the options of records
AFTER_RECORDS = settings_of(BuildConfig).keys() - set(BEFORE_RECORDS)


@click.command()
@click.argument("sources", nargs=-1, metavar="SOURCE...")
@options_of(BuildConfig, omit=AFTER_RECORDS)
@attach_record_options
@options_of(BuildConfig, omit=BEFORE_RECORDS, workers={"help": "Processes. [default: one a core]"})
@click.option("--progress/--no-progress", default=None, help="Progress on stderr. [default: on a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest's figures as JSON.")
@settings_file(BuildConfig, RecordOptions, positional="sources", table="source")
def build(as_json: bool, progress: bool | None, source: Any, **settings: Any) -> None:
    """Turn a corpus into packed shards.

    SOURCE is a file, glob, directory, - (JSONL on stdin), save_to_disk folder, hf:NAME or an fsspec URL; NAME=SOURCE
    names it for reports and mixing.

    \b
    Example:
      pack build corpus/*.jsonl.gz --tokenizer ./tokenizer --seq-len 4096 --out data/corpus
      pack build chats.jsonl --messages-field messages --tokenizer ./tokenizer --seq-len 8192 --out data/chats
      pack build --config build.toml --seq-len 16384
    """
    from pipeline.building.driver import build as run_build
    from pipeline.building.progress import RichProgress

    settings = {"workers": usable_cores()} | settings
    records = record_options(settings)
    by_source = source_options(source, records)
    if not by_source:  # whose sources may need what the others do not
        refuse_idle(records)
    settings["out"] = os.path.expanduser(settings["out"])  # noqa: PTH111  # a shell leaves --out=~/data
    config = BuildConfig(records=records, source_records=by_source, **settings)
    out = str(config.out)
    with RichProgress(progress) as shown:
        try:
            result = run_build(config, shown)
        except KeyboardInterrupt:
            shown.on_message(f"{out}: stopped; the windows that are done are kept. Add --resume to continue.")
            raise SystemExit(130) from None
    _print_result(result, as_json)


@click.command()
@click.argument("dataset", required=False, metavar="DATASET", type=click.Path())
@options_of(RepackConfig, omit=("dataset",))
@click.option("--progress/--no-progress", default=None, help="Progress on stderr. [default: on a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest's figures as JSON.")
@settings_file(RepackConfig, positional="dataset")
def repack(as_json: bool, progress: bool | None, **settings: Any) -> None:
    """Pack a dataset's documents anew, without tokenizing.

    What is not given stays as it is in DATASET. Where its build lost nothing, the result is the dataset that pack build
    would make of the corpus with these settings, byte for byte.

    \b
    Example:
      pack repack data/corpus --seq-len 16384 --out data/corpus-16k
    """
    from pipeline.building.progress import RichProgress
    from pipeline.building.repacking.repack import repack as run_repack

    config = RepackConfig(**settings)
    with RichProgress(progress) as shown:
        try:
            result = run_repack(config, shown)
        except KeyboardInterrupt:
            shown.on_message(f"{config.out}: stopped; the windows that are done are kept. Add --resume to continue.")
            raise SystemExit(130) from None
    _print_result(result, as_json)


def _print_result(result: Any, as_json: bool) -> None:
    """Print what a build or a repacking made."""
    manifest = result.manifest
    if as_json:
        figures = manifest or {"plan_id": result.plan_id, "unfinished": result.unfinished}
        held_out = {"holdout": dict(result.holdout.manifest)} if result.holdout else {}
        click.echo(json.dumps(dict(figures) | held_out))
    elif manifest is not None:
        from pipeline.report.summary import summary_lines

        say("\n".join(summary_lines(manifest, result.path)))
        if result.holdout is not None:
            say("\n".join(summary_lines(result.holdout.manifest, result.holdout.path)))


@click.command()
@click.argument("dataset", type=click.Path())
@click.option(
    "--level",
    type=click.Choice(["size", "sample", "full"]),
    default="full",
    show_default=True,
    help="How much to read.",
)
@click.option("--vocab-size", type=int, help="Also demand every token id below this, a model's vocabulary.")
@click.option(
    "--against", multiple=True, metavar="SOURCE", help="Re-tokenize SOURCE and find every document (repeatable)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@cache_options
def verify(
    dataset: str, level: Any, vocab_size: int | None, against: tuple[str, ...], as_json: bool, cache: Any
) -> None:
    """Check a dataset rule by rule.

    Exit code 1 when any rule of docs/format.md is broken; every broken rule is one line.

    \b
    Example:
      pack verify data/corpus
      pack verify data/corpus --against corpus.jsonl
    """
    from dataclasses import asdict

    from shards.verification import verify as run_verify

    report = run_verify(dataset, level, vocab_size, cache)
    if against and report.ok:
        from pipeline.building.audit import audit_sources

        audit_sources(dataset, against, report)
    if as_json:
        click.echo(json.dumps(asdict(report) | {"ok": report.ok}))
    for problem in report.problems if not as_json else ():
        say(printable(problem.message), err=True)
    if not as_json and report.ok:
        rows = (report.shards_checked, "shard"), (report.packs_checked, "pack"), (report.tokens_checked, "token")
        seen = "files, sizes and sums" if level == "size" else ", ".join(counted(*each) for each in rows)
        say(f"{dataset}: intact ({level}: {seen} checked){report.against and '; '}{report.against}")
    if not report.ok:
        raise SystemExit(1)
