"""The `pack` command: flags to a config, one call, print.

Nothing heavy is imported before a command runs, so `pack --help` answers at once; commands of the trainer are named as
strings and loaded when asked for.
"""

import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Container
from dataclasses import MISSING
from functools import wraps
from importlib import import_module
from inspect import isfunction
from typing import Any

import click

from pipeline.config import BuildConfig, RecordOptions, RepackConfig
from pipeline.recipe import kind_of, read_template, refuse_idle, source_options
from shards.errors import PackError, counted
from shards.settings import Setting, check_settings, format_settings, parse_mix, read_settings, settings_of
from shards.text import printable

LAZY = {
    "export": "pipeline.export.cli:export",
    "push": "pipeline.export.cli:push",
    "pull": "pipeline.export.cli:pull",
    "train": "trainer.cli:train",
    "export-model": "trainer.cli:export_model",
    "check-model": "trainer.cli:check_model",
    "trace": "trainer.documents.cli:trace",
    "score": "trainer.documents.cli:score",
    "bench": "trainer.cli:bench",
    "demo": "trainer.cli:demo",
}
STDOUT_WRITERS = ("click.utils", "rich.console")  # the modules that write to stdout
ARGUMENT = re.compile(r"`(?P<name>[a-z][a-z0-9_]*)(?:=\"?(?P<value>[^`\"]*)\"?)?`")  # how messages name a setting
BEFORE_RECORDS = ("out", "tokenizer", "seq_len")  # what --help shows before the options of records
AFTER_RECORDS = settings_of(BuildConfig).keys() - set(BEFORE_RECORDS)
POSITIONALS = Setting(name="sources", type=str, help="", default=MISSING, choices=(), repeatable=True)
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


def names_of(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas."""
    return tuple(filter(None, map(str.strip, text.split(","))))


# the fields whose flags are written otherwise than their type says
TYPES: dict[str, Any] = {"window_bytes": Size(), "mix": parse_mix, "lora_targets": names_of, "strategies": names_of}


def in_flags(message: str, command: click.Command) -> str:
    """Write the settings that a message names as flags of a command.

    `seq_len` becomes --seq-len, `on_error="skip"` --on-error skip, `add_eos=False` --no-eos, `sources` SOURCE; what is
    no parameter of this command stays as it is.
    """
    parameters = {parameter.name: parameter for parameter in command.params}

    def flag(match: re.Match[str]) -> str:
        parameter = parameters.get(match["name"])
        if parameter is None:
            return match[0]
        if isinstance(parameter, click.Argument):
            return parameter.make_metavar(click.Context(command)).strip("[].")
        value = match["value"]
        if value == "False" and parameter.secondary_opts:
            return parameter.secondary_opts[0]
        return parameter.opts[0] + (f" {value}" if value and not getattr(parameter, "is_flag", False) else "")

    return ARGUMENT.sub(flag, message)


class PackGroup(click.Group):
    """A group whose other commands load late, and whose faults are one line each."""

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
        if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding has not becomes a question mark
            sys.stdout.reconfigure(errors="replace")
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

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the flags in front of the command."""
        try:
            return super().make_context(*args, **kwargs)
        except click.ClickException as error:
            _make_printable(error)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that the user can fix is one line on stderr and exit code 1."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            _make_printable(error)
            raise
        except PackError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            raise click.ClickException(printable(in_flags(str(error), command or self))) from error


def _make_printable(error: click.ClickException) -> None:
    """Disarm what a file name that a shell expanded, or another argument, brings into click's own messages."""
    for name, value in vars(error).items():
        if isinstance(value, str):
            setattr(error, name, printable(value, lines=True))


def say(text: str, *, err: bool = False) -> None:
    """Print lines on stdout or stderr, whatever the names in them."""
    click.echo(printable(text, lines=True), err=err)


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


def options_of(record: type, omit: Container[str] = (), **changes: dict[str, Any]) -> Callable[[Any], Any]:
    """Attach a flag for each field of a settings record that has a help text.

    A flag that is not given arrives as None: `given` leaves it out, so that the record's own default holds.

    Args:
        record: The class, such as `BuildConfig`.
        omit: Fields without a flag.
        changes: By field, what the flag has otherwise than its field says, as keywords of `click.option`.
    """

    def attach(command: Any) -> Any:
        for setting in reversed([setting for name, setting in settings_of(record).items() if name not in omit]):
            command = _option(setting, **changes.get(setting.name, {}))(command)
        return command

    return attach


def _option(setting: Setting, **changes: Any) -> Any:
    kind = TYPES.get(setting.name, click.Choice(setting.choices) if setting.choices else setting.type)
    flag = setting.name.removeprefix("add_").replace("_", "-")
    names = f"--{flag}/--no-{flag}" if setting.default is True else f"--{flag}"
    text, default = setting.help, flag if setting.default is True else setting.default
    shown = changes.pop("show_default", "[default:" not in text)
    if shown and default not in (MISSING, None, ()) and default is not False:
        text = f"{text} [default: {default}]"
    keywords: dict[str, Any] = {"help": text + "  [required]" * (default is MISSING), "default": None}
    if setting.type is bool:
        keywords |= {"is_flag": True}
    elif setting.repeatable and setting.name not in TYPES:
        keywords |= {"type": kind, "multiple": True}
    else:
        keywords |= {"type": kind, "metavar": "TEXT" if isfunction(kind) else None}
    return click.option(names, setting.name, **keywords | changes)


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were written on the command line."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def settings_file(*records: type, positional: str, table: str | None = None) -> Callable[[Any], Any]:
    """Attach --config and --print-config: settings from a file, over which flags win.

    The command gets the settings that were given by either as keywords, and its other options as they are.

    Args:
        records: The classes whose fields may be named.
        positional: The setting that the command line gives without a flag.
        table: The name of tables of further settings, which pass unchecked.
    """
    settings = {name: setting for record in records for name, setting in settings_of(record).items()}
    settings.setdefault(positional, POSITIONALS)
    convert = {name: click.types.convert_type(kind) for name, kind in TYPES.items()}

    def attach(command: Any) -> Any:
        @wraps(command)
        def run(config: str | None, print_config: bool, **options: Any) -> None:
            content = read_settings(config) if config else {}
            tables = {table: content.pop(table)} if table in content else {}
            values = check_settings(content, settings, config or "", convert) | given(
                {name: value for name, value in options.items() if name in settings}
            )
            if print_config:
                click.echo(format_settings(values | tables))
                return
            context = click.get_current_context()
            for parameter in context.command.params:
                setting = settings.get(parameter.name or "")
                if setting is not None and setting.default is MISSING and setting.name not in values:
                    raise click.MissingParameter(ctx=context, param=parameter)
            others = {name: value for name, value in options.items() if name not in settings}
            command(**others | values | ({table: tables.get(table, {})} if table else {}))

        file = click.Path(exists=True, dir_okay=False)
        run = click.option("--print-config", is_flag=True, help="Print these settings as such a file, and end.")(run)
        return click.option("--config", type=file, help="TOML file of settings, named as the flags; flags win.")(run)

    return attach


def _record_options(command: Any) -> Any:
    """Attach the flags that say how a record becomes a document."""
    template = {"type": click.Path(exists=True, dir_okay=False)}
    # that any of these is named says what the records are
    unsaid = {name: {"show_default": False} for name in ("messages_field", "prompt_field", "completion_field")}
    return options_of(RecordOptions, chat_template=template, **unsaid)(command)


def record_options(flags: dict[str, Any]) -> RecordOptions:
    """Take the options of records out of `flags`; the kind of the records follows from the fields that are named."""
    names = settings_of(RecordOptions).keys() & flags.keys()
    chosen = {name: flags.pop(name) for name in names}
    kind = kind_of(chosen.keys(), "flags")
    if "chat_template" in chosen:
        chosen["chat_template"] = read_template(chosen["chat_template"], "--chat-template")
    return RecordOptions(kind=kind or "text", **chosen)


@main.command()
@click.argument("sources", nargs=-1, metavar="SOURCE...")
@options_of(BuildConfig, omit=AFTER_RECORDS)
@_record_options
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


@main.command()
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
    from pipeline.building.repack import repack as run_repack

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
        click.echo(json.dumps({key: value for key, value in figures.items() if key != "shards"}))
    elif manifest is not None:
        from pipeline.report.dataset import summary_lines

        say("\n".join(summary_lines(dict(manifest), result.path)))


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


@main.command()
@click.argument("paths", nargs=-1, required=True, metavar="DATASET...", type=click.Path())
@click.option("--packs-per-step", type=click.IntRange(min=1), default=32, show_default=True, help="Packs of one step.")
@click.option("--model", help="Model directory, config.json or hub name, for costs and limits. [default: 1.24B shape]")
@click.option("--mix", type=parse_mix, metavar="TEXT", help="Weights as in pack train, such as web=0.7,code=0.3.")
@click.option("--rows", "rows", is_flag=True, help="Read every row: exact lengths, duplicates, used vocabulary.")
@click.option("--html", type=click.Path(dir_okay=False), help="Also write a page that opens offline.")
@click.option("--strict", is_flag=True, help="Exit with code 1 when there is any warning.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON (docs/report.md).")
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


@main.command("show")
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
@click.argument("sources", nargs=-1, metavar="SOURCE...")
@click.option("--tokenizer", help="Tokenizer directory or hub name.  [required]")
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


@main.command("check-template")
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
