"""Options of records by source name, and what they imply.

In a settings file (`pack build --config`) a table for each source that differs from the others:

    [source.chat]
    messages_field = "messages"
    train_on = "assistant"

A table replaces the options that it names; the kind of the records follows from the fields.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import Kind, RecordOptions
from shards.errors import PackError, reason_of
from shards.settings import check_settings, settings_of

OPTIONS = settings_of(RecordOptions)


def source_options(tables: Any, defaults: RecordOptions) -> dict[str, RecordOptions]:
    """Return the options of every source that has a table.

    Args:
        tables: The tables by source name, as parsed.
        defaults: Options that a table does not mention.

    Raises:
        PackError: No tables, an unknown option, or a wrong type or value.
    """
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        raise PackError("source: expected tables of options, such as [source.chat].")
    return {name: _options(f"source {name!r}", table, defaults) for name, table in tables.items()}


def _options(where: str, table: Mapping[str, Any], defaults: RecordOptions) -> RecordOptions:
    chosen = check_settings({name: value for name, value in table.items() if name != "kind"}, OPTIONS, where)
    if kind := table.get("kind") or kind_of(chosen.keys(), where):
        chosen["kind"] = kind
    if "chat_template" in chosen:
        chosen["chat_template"] = read_template(chosen["chat_template"], f"{where}: chat_template")
    try:
        return replace(defaults, **chosen)
    except PackError as error:
        raise PackError(f"{where}: {error}") from None


def read_template(path: str, where: str) -> str:
    """Return the text of a chat template's file; a template itself is returned as it is.

    Raises:
        PackError: It cannot be read as UTF-8.
    """
    if "{" in path:
        return path
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
        **dict.fromkeys(("ids_field", "labels_field", "mask_field", "eos_id", "append_eos", "token_type"), "tokens"),
    }
    implied = {kinds[name] for name in named & kinds.keys()}
    if len(implied) > 1:
        names = " and ".join(sorted(named & kinds.keys()))
        raise PackError(f"{where}: {names} belong to records of different kinds; expected one kind. Omit the others.")
    return implied.pop() if implied else None
