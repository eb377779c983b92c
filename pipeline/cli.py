"""The `pack` command: flags to a config, one call, print.

Nothing heavy is imported before a command runs, so `pack --help` answers at once; commands of the trainer are named as
strings and loaded when asked for.
"""

import json
import os
import re
import sys
import traceback
from dataclasses import fields
from importlib import import_module
from typing import Any

import click

from pipeline.config import OVERLONG, PACKER_NAMES, BuildConfig, RecordOptions
from pipeline.recipe import kind_of, read_recipe, read_template, refuse_idle
from shards.errors import PackError, counted

LAZY = {
    "train": "trainer.cli:train",
    "check-model": "trainer.cli:check_model",
    "bench": "trainer.cli:bench",
    "demo": "trainer.cli:demo",
}
STDOUT_WRITERS = ("click.utils", "rich.console")  # the modules that write to stdout
UNITS = {"": 1, "B": 1}
UNITS |= {unit: 1000**k for k, unit in enumerate(("KB", "MB", "GB", "TB"), 1)}
UNITS |= {unit: 1024**k for k, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)}


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Size(click.ParamType[int]):
    """A number of bytes with an optional unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        if match is None or match[2].upper() not in UNITS:
            self.fail(f"{value!r} is not a size; write for example 64MiB or 100MB", param, ctx)
        return int(float(match[1]) * UNITS[match[2].upper()])


class PackGroup(click.Group):
    """A group whose torch commands load late, and whose faults are one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names in the order of a person's work."""
        return [*self.commands, *LAZY]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        if cmd_name in LAZY:
            module, attribute = LAZY[cmd_name].split(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a program; an output that cannot be written (a full disk behind `>`) is one line on stderr too."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
            if frame.f_globals["__name__"] not in STDOUT_WRITERS:
                raise
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123  # or Python tries again as it exits
            reason = f"cannot be written ({error.strerror}); what the command made is kept"
            click.echo(f"Error: stdout: {reason}. Send the output elsewhere.", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a fault that the user can mend is one line on stderr and exit code 1."""
        try:
            return super().invoke(ctx)
        except PackError as error:
            # library messages name arguments in backticks, as Python writes them
            message = getattr(error, "flag_message", str(error))
            flags = re.sub(r"`([a-z][a-z0-9_]*)`", lambda match: "--" + match[1].replace("_", "-"), message)
            raise click.ClickException(flags) from error


@click.group(cls=PackGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="shardpack")
def main() -> None:
    """Pack a corpus once, then train on nothing but tokens.

    \b
    Example:
      pack build corpus.jsonl --tokenizer ./tokenizer --seq-len 4096 --out data/corpus
      pack inspect data/corpus
      pack train data/corpus --model ./model --out runs/first
    """


def parse_mix(context: click.Context, option: click.Parameter, value: str | None) -> dict[str, float]:
    """Parse weights by source name, such as web=0.7,code=0.3."""
    mix: dict[str, float] = {}
    for part in value.split(",") if value else []:
        name, _, weight = part.rpartition("=")
        if not name or not re.fullmatch(r"\d*\.?\d+", weight):
            raise click.BadParameter(f"{part!r} is not NAME=WEIGHT, such as web=0.7", context, option)
        mix[name.strip()] = float(weight)
    return mix


def _record_options(command: Any) -> Any:
    """Attach the flags that say how a record becomes a document."""
    options = [
        click.option("--text-field", help="Field with the text; dots reach into nested objects. [default: text]"),
        click.option("--messages-field", help="Field with a conversation (role/content or from/value)."),
        click.option(
            "--tools-field", default="tools", show_default=True, help="Field with the tool schemas of a chat."
        ),
        click.option("--prompt-field", help="Field with the prompt of an instruction."),
        click.option("--completion-field", help="Field with its completion."),
        click.option(
            "--train-on",
            default="auto",
            show_default=True,
            help="Targets: all, assistant, last-assistant, completion, or role names with commas.",
        ),
        click.option(
            "--chat-template",
            type=click.Path(exists=True, dir_okay=False),
            help="Jinja file instead of the tokenizer's template.",
        ),
        click.option(
            "--overlong",
            type=click.Choice(["auto", *OVERLONG]),
            default="auto",
            show_default=True,
            help="Documents longer than seq-len; auto splits text and drops the rest. Not for --packer wrapped.",
        ),
        click.option(
            "--truncate-side",
            type=click.Choice(["right", "left"]),
            default="right",
            show_default=True,
            help="Side that truncation cuts off.",
        ),
        click.option("--keep-no-target", is_flag=True, help="Keep documents without any target."),
        click.option("--train-template-tokens", is_flag=True, help="Train on what a template inserts inside answers."),
        click.option("--parse-special", is_flag=True, help="Read control tokens in the corpus as such, not as text."),
        click.option("--eos/--no-eos", "add_eos", default=True, show_default=True, help="One EOS after each document."),
        click.option(
            "--text-unit",
            type=click.Choice(["file", "line"]),
            default="file",
            show_default=True,
            help="One document in a plain text file.",
        ),
        click.option("--format", "format", help="Format of the files where their names do not tell, such as jsonl."),
        click.option(
            "--recipe", type=click.Path(exists=True, dir_okay=False), help="TOML file with options by source name."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def record_options(flags: dict[str, Any]) -> dict[str, Any]:
    """Take the record flags out of `flags`, and return the options of all sources and those by source name.

    The kind of the records follows from the fields that are named.
    """
    names = {entry.name for entry in fields(RecordOptions)} & flags.keys()
    chosen = {name: value for name in names if (value := flags.pop(name)) is not None}
    kind = kind_of(chosen.keys(), "flags")
    if "chat_template" in chosen:
        chosen["chat_template"] = read_template(chosen["chat_template"], "--chat-template")
    records = RecordOptions(kind=kind or "text", **chosen)
    recipe = flags.pop("recipe")
    if not recipe:  # whose sources may need what the others do not
        refuse_idle(records)
    return {"records": records, "source_records": read_recipe(recipe, records) if recipe else {}}


@main.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--out", required=True, help="Dataset directory, or an fsspec URL.")
@click.option("--tokenizer", required=True, help="Tokenizer directory or hub name.")
@click.option("--seq-len", type=int, required=True, help="Capacity of a pack, in tokens.")
@_record_options
@click.option(
    "--packer",
    type=click.Choice(PACKER_NAMES),
    default="auto",
    show_default=True,
    help="How segments share packs; wrapped cuts documents where a row is full, conversations too, inside turns.",
)
@click.option("--max-segments", type=int, help="Most segments in one pack. [default: no limit]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every random choice.")
@click.option("--position-ids/--no-position-ids", default=True, show_default=True, help="Store position ids.")
@click.option(
    "--window-bytes", type=Size(), help="Corpus bytes in one window, such as 64MiB. [default: by corpus size]"
)
@click.option("--workers", type=int, default=usable_cores, help="Processes. [default: one a core]")
@click.option(
    "--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True, help="Where windows run."
)
@click.option(
    "--tokenizer-engine",
    type=click.Choice(["auto", "tokenizers", "fastokens", "gigatoken"]),
    default="auto",
    show_default=True,
    help="Engine; a fast one is checked against tokenizers all along.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted build.")
@click.option("--overwrite", is_flag=True, help="Remove an older dataset there first.")
@click.option("--windows", help="Only windows i, i+n, i+2n …, as i::n, for job arrays.")
@click.option("--finalize", is_flag=True, help="Run no window; commit what is there.")
@click.option(
    "--on-error", type=click.Choice(["fail", "skip"]), default="fail", show_default=True, help="At a bad record."
)
@click.option(
    "--max-rejected", type=float, default=0.01, show_default=True, help="Share of bad records that stops a build."
)
@click.option("--progress/--no-progress", default=None, help="Progress on stderr. [default: on a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest's figures as JSON.")
def build(as_json: bool, progress: bool | None, **flags: Any) -> None:
    """Turn a corpus into packed shards.

    SOURCE is a file, glob, directory, - (JSONL on stdin), save_to_disk folder, hf:NAME or an fsspec URL; NAME=SOURCE
    names it for reports and mixing.

    \b
    Example:
      pack build corpus/*.jsonl.gz --tokenizer ./tokenizer --seq-len 4096 --out data/corpus
      pack build chats.jsonl --messages-field messages --tokenizer ./tokenizer --seq-len 8192 --out data/chats
    """
    from pipeline.building.driver import build as run_build
    from pipeline.building.progress import RichProgress

    options = record_options(flags)
    flags["out"] = os.path.expanduser(flags["out"])  # noqa: PTH111  # a shell leaves --out=~/data
    config = BuildConfig(**options, **flags)
    with RichProgress(progress) as shown:
        try:
            manifest = run_build(config, shown)
        except KeyboardInterrupt:
            shown.say(f"{config.out}: stopped; the windows that are done are kept. Add --resume to continue.")
            raise SystemExit(130) from None
    if as_json:
        click.echo(json.dumps({key: value for key, value in manifest.items() if key != "shards"}))
    elif "unfinished" not in manifest:
        from pipeline.report.dataset import summary_lines

        click.echo("\n".join(summary_lines(manifest, config.out)))


@main.command()
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
def verify(dataset: str, level: Any, vocab_size: int | None, against: tuple[str, ...], as_json: bool) -> None:
    """Check a dataset rule by rule.

    Exit code 1 when any rule of docs/format.md is broken; every broken rule is one line.

    \b
    Example:
      pack verify data/corpus
      pack verify data/corpus --against corpus.jsonl
    """
    from dataclasses import asdict

    from shards.verification import verify as run_verify

    report = run_verify(dataset, level, vocab_size)
    if against and report.ok:
        from pipeline.building.audit import compare_with_sources

        compare_with_sources(dataset, against, report)
    if as_json:
        click.echo(json.dumps(asdict(report) | {"ok": report.ok}))
    for problem in report.problems if not as_json else ():
        click.echo(problem.message, err=True)
    if not as_json and report.ok:
        rows = (report.shards_checked, "shard"), (report.packs_checked, "pack"), (report.tokens_checked, "token")
        seen = "files, sizes and sums" if level == "size" else ", ".join(counted(*each) for each in rows)
        click.echo(f"{dataset}: sound ({level}: {seen} checked){report.against and '; '}{report.against}")
    if not report.ok:
        raise SystemExit(1)


@main.command()
@click.argument("paths", nargs=-1, required=True, metavar="DATASET...", type=click.Path())
@click.option("--packs-per-step", type=click.IntRange(min=1), default=32, show_default=True, help="Packs of one step.")
@click.option("--model", help="Model directory, config.json or hub name, for costs and limits. [default: 1.24B shape]")
@click.option("--mix", callback=parse_mix, help="Weights as in pack train, such as web=0.7,code=0.3.")
@click.option("--rows", "rows", is_flag=True, help="Read every row: exact lengths, duplicates, used vocabulary.")
@click.option("--html", type=click.Path(dir_okay=False), help="Also write a page that opens offline.")
@click.option("--strict", is_flag=True, help="Exit with code 1 when there is any warning.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON (docs/report.md).")
def inspect(paths: tuple[str, ...], as_json: bool, html: str | None, strict: bool, **options: Any) -> None:
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

    inspection = Inspection(paths, **options)
    if html:
        inspection.write_page(html)
    if as_json:
        click.echo(inspection.json())
    else:
        print_view(inspection.view())
    if strict and any(report["warnings"] for report in inspection.reports):
        raise SystemExit(1)


@main.command("show")
@click.argument("dataset", type=click.Path())
@click.argument("row", type=int, default=0)
@click.option("--doc", help="Packs that hold this document: its doc_id, or window:record.")
@click.option("--grep", help="Packs with this text inside one segment.")
@click.option("--limit", type=click.IntRange(min=1), default=3, show_default=True, help="Most packs that --grep shows.")
@click.option("--tokens", type=click.IntRange(min=1), help="Most tokens of a segment. [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a pack.")
def show_command(dataset: str, as_json: bool, **options: Any) -> None:
    """Decode packs: segments, targets, special tokens.

    \b
    Example:
      pack show data/corpus 17
      pack show data/corpus --doc 0:42
    """
    from pipeline.report.show import show_packs

    for line in show_packs(dataset, as_json=as_json, **options):
        click.echo(line)


@main.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--tokenizer", required=True, help="Tokenizer directory or hub name.")
@_record_options
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
def plan(as_json: bool, **flags: Any) -> None:
    """Say what each seq_len and packer would give.

    Samples the corpus and writes nothing.

    \b
    Example:
      pack plan corpus/*.jsonl --tokenizer ./tokenizer
    """
    from pipeline.estimate.advisor import estimate_corpus
    from pipeline.estimate.view import estimate_view
    from pipeline.report.terminal import print_view

    options = record_options(flags)
    found = estimate_corpus(**options, **flags)
    if as_json:
        click.echo(json.dumps(found))
    else:
        print_view(estimate_view(found))
