"""The `pack` command: flags to a config, one call, print.

Nothing heavy is imported before a command runs, so `pack --help` answers at once; commands of the trainer are named as
strings and loaded when asked for.
"""

import io
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

from pipeline.config import RecordOptions
from pipeline.recipe import kind_of, read_template
from shards.errors import PackError
from shards.settings import Setting, check_settings, format_settings, parse_mix, read_settings, settings_of
from shards.text import printable

LAZY = {
    "build": "pipeline.building.cli:build",
    "repack": "pipeline.building.cli:repack",
    "verify": "pipeline.building.cli:verify",
    "inspect": "pipeline.report.cli:inspect",
    "show": "pipeline.report.cli:show",
    "plan": "pipeline.estimate.cli:plan",
    "check-template": "pipeline.estimate.cli:check_template",
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


class Share(click.ParamType[float]):
    """A share, as a number or in percent."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the share, 1.0 for all."""
        try:
            if isinstance(value, str) and value.strip().endswith("%"):
                return float(value.strip()[:-1]) / 100
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is not a share; write for example 1% or 0.01", param, ctx)


def names_of(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas."""
    return tuple(filter(None, map(str.strip, text.split(","))))


# the fields whose flags are written otherwise than their type says
TYPES: dict[str, Any] = {
    "window_bytes": Size(),
    "holdout": Share(),
    "mix": parse_mix,
    "lora_targets": names_of,
    "strategies": names_of,
}


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


def attach_record_options(command: Any) -> Any:
    """Attach the flags that say how a record becomes a document."""
    template = {"type": click.Path(exists=True, dir_okay=False)}
    # that any of these is named says what the records are
    unsaid = {name: {"show_default": False} for name in ("messages_field", "prompt_field", "completion_field")}
    return options_of(RecordOptions, chat_template=template, **unsaid)(command)


def cache_options(command: Any) -> Any:
    """Attach what says where shards of a URL are kept; the command gets it as `cache`."""

    @click.option("--cache-dir", help="Where shards of a URL are kept. [default: ~/.cache/shardpack/datasets]")
    @click.option("--cache-limit", default="100GB", show_default=True, help="Most bytes of shards kept there.")
    @wraps(command)
    def with_cache(*arguments: Any, cache_dir: str | None, cache_limit: str, **options: Any) -> Any:
        from shards.fetching.cache import Cache, parse_size
        from shards.fetching.remote import is_url

        named = [value for value in options.values() if isinstance(value, str | tuple)]
        places = [place for value in named for place in ([value] if isinstance(value, str) else value)]
        parse_size(cache_limit)
        cache = Cache(cache_dir, cache_limit) if any(is_url(str(place)) for place in places) else None
        return command(*arguments, cache=cache, **options)

    return with_cache


def record_options(flags: dict[str, Any]) -> RecordOptions:
    """Take the options of records out of `flags`; the kind of the records follows from the fields that are named."""
    names = settings_of(RecordOptions).keys() & flags.keys()
    chosen = {name: flags.pop(name) for name in names}
    kind = kind_of(chosen.keys(), "flags")
    if "chat_template" in chosen:
        chosen["chat_template"] = read_template(chosen["chat_template"], "--chat-template")
    return RecordOptions(kind=kind or "text", **chosen)
