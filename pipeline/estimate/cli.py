"""Commands that say what a build would give: flags to a call, print."""

import json
from typing import Any

import click

from pipeline.cli import attach_record_options, options_of, record_options, settings_file, usable_cores
from pipeline.config import BuildConfig, RecordOptions
from pipeline.recipe import read_template, refuse_idle, source_options
from shards.settings import settings_of


@click.command()
@click.argument("sources", nargs=-1, metavar="SOURCE...")
@click.option("--tokenizer", help="Tokenizer directory or hub name.  [required]")
@attach_record_options
@click.option("--model", help="Model directory, config.json or hub name, for costs and limits. [default: 1.24B shape]")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Most seconds of sampling.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the places that are sampled.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=usable_cores,
    help="Processes of the build whose time is estimated. [default: one a core]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON (docs/report.md).")
@settings_file(BuildConfig, RecordOptions, positional="sources", table="source")
def plan(as_json: bool, source: Any, **settings: Any) -> None:
    """Say what each seq_len and packer would give.

    Samples the corpus and writes nothing.

    \b
    Example:
      pack plan corpus/*.jsonl --tokenizer ./tokenizer
    """
    from pipeline.estimate.advisor import estimate_corpus
    from pipeline.estimate.view import estimate_view
    from pipeline.report.terminal import print_view

    records = record_options(settings)
    by_source = source_options(source, records)
    if not by_source:
        refuse_idle(records)
    asked = {name: settings[name] for name in ("sources", "tokenizer", "model", "seconds", "seed", "workers")}
    found = estimate_corpus(records=records, source_records=by_source, **asked)
    if as_json:
        click.echo(json.dumps(found))
    else:
        print_view(estimate_view(found))


@click.command("check-template")
@click.argument("tokenizer", type=click.Path())
@click.argument("sources", nargs=-1, metavar="[CORPUS]...")
@options_of(
    RecordOptions,
    omit=settings_of(RecordOptions).keys() - {"messages_field", "tools_field", "train_on", "unroll", "chat_template"},
    chat_template={"type": click.Path(exists=True, dir_okay=False)},
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check_template(tokenizer: str, sources: tuple[str, ...], as_json: bool, **settings: Any) -> None:
    """Say what a chat template does to conversations.

    Tries one of every kind and says which turns are trained; of a corpus, which conversations it takes and why not the
    others. Writes nothing.

    \b
    Example:
      pack check-template ./tokenizer chats.jsonl
    """
    from pipeline.estimate.template_check import check_template as check
    from pipeline.estimate.template_view import template_view
    from pipeline.report.terminal import print_view

    chosen = {name: value for name, value in settings.items() if value is not None}
    if "chat_template" in chosen:
        chosen["chat_template"] = read_template(chosen["chat_template"], "--chat-template")
    found = check(tokenizer, RecordOptions(kind="chat", **chosen), sources)
    if as_json:
        click.echo(json.dumps(found))
    else:
        print_view(template_view(found))
