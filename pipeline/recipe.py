"""Options by source name, from a small TOML file.

    [sources.chat]
    messages_field = "messages"
    train_on = "assistant"

    [sources.web]
    text_field = "body"

Each table starts from the flags of the command and replaces the options it names; the kind follows from the fields.
"""

import tomllib
from collections.abc import Set
from dataclasses import fields, replace
from pathlib import Path

from pipeline.config import Kind, RecordOptions
from shards.errors import PackError, reason_of

OPTIONS = {entry.name: entry for entry in fields(RecordOptions)}


def read_recipe(path: str, defaults: RecordOptions) -> dict[str, RecordOptions]:
    """Return the options of every source that the file names.

    Args:
        path: TOML file.
        defaults: Options that a table does not mention.

    Raises:
        PackError: Not TOML, an unknown option, or a wrong type.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PackError(f"{path}: is not TOML ({error}). Write [sources.NAME] tables.") from error
    tables = content.get("sources", {})
    named = tables.values() if isinstance(tables, dict) else [tables]
    if set(content) != {"sources"} or not all(isinstance(table, dict) for table in named):
        raise PackError(f"{path}: has {', '.join(content) or 'nothing'}; expected [sources.NAME] tables.")
    return {name: _options(f"{path}, source {name!r}", table, defaults) for name, table in tables.items()}


def _options(where: str, table: dict[str, object], defaults: RecordOptions) -> RecordOptions:
    for name, value in table.items():
        if name not in OPTIONS:
            raise PackError(f"{where}: unknown option {name!r}; expected one of {', '.join(OPTIONS)}.")
        flag = isinstance(OPTIONS[name].default, bool)
        if not isinstance(value, bool if flag else str):
            raise PackError(f"{where}: {name} is {value!r}; expected {'true or false' if flag else 'a string'}.")
    chosen = dict(table)
    if "kind" not in chosen and (kind := kind_of(table.keys(), where)):
        chosen["kind"] = kind
    template = chosen.get("chat_template")
    if isinstance(template, str) and "{" not in template:  # a file name, not a template
        chosen["chat_template"] = read_template(template, f"{where}: chat_template")
    try:
        return replace(defaults, **chosen)  # type: ignore[arg-type]
    except PackError as error:
        raise PackError(f"{where}: {error}") from None


def read_template(path: str, where: str) -> str:
    """Return the text of a chat template's file.

    Raises:
        PackError: It cannot be read as UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PackError(f"{where} {path}: cannot be read ({reason_of(error)}). Give a Jinja file in UTF-8.") from error


def refuse_idle(options: RecordOptions) -> None:
    """Refuse options of the only records of a build that would do nothing for them.

    Raises:
        PackError: A template or tools without messages, or a side to truncate where nothing is truncated.
    """
    if options.kind == "text":
        for name in ("chat_template", "tools_field", "train_template_tokens"):
            if getattr(options, name) != OPTIONS[name].default:
                raise PackError(f"`{name}`: plain text has no messages. Add `messages_field`, or leave it out.")
    if options.truncate_side == "left" and options.overlong not in ("truncate", "truncate-turns"):
        raise PackError(
            f'`truncate_side="left"`: `overlong="{options.overlong}"` truncates nothing. Add `overlong="truncate"`.'
        )


def kind_of(named: Set[str], where: str) -> Kind | None:
    """Return the kind of records that the named fields imply; None where none is named.

    Raises:
        PackError: Fields of two kinds are named.
    """
    kinds: dict[str, Kind] = {
        "text_field": "text",
        "messages_field": "chat",
        "prompt_field": "instruction",
        "completion_field": "instruction",
    }
    implied = {kinds[name] for name in named & kinds.keys()}
    if len(implied) > 1:
        names = " and ".join(sorted(named & kinds.keys()))
        raise PackError(f"{where}: {names} belong to records of different kinds; expected one kind. Omit the others.")
    return implied.pop() if implied else None
