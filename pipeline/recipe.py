"""Options by source name, from a small TOML file.

    [sources.chat]
    messages_field = "messages"
    train_on = "assistant"

    [sources.web]
    text_field = "body"

Each table starts from the flags of the command and replaces the options it names; the kind follows from the fields.
"""

import tomllib
from dataclasses import fields, replace
from pathlib import Path

from pipeline.config import Kind, RecordOptions
from shards.errors import PackError

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
    if set(content) != {"sources"} or not all(isinstance(table, dict) for table in tables.values()):
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
    if "kind" not in chosen and (kind := kind_of({name for name in table if name.endswith("_field")}, where)):
        chosen["kind"] = kind
    template = chosen.get("chat_template")
    if isinstance(template, str) and "{" not in template:  # a file name, not a template
        try:
            chosen["chat_template"] = Path(template).read_text(encoding="utf-8")
        except OSError as error:
            raise PackError(f"{where}: chat_template {template!r} cannot be read ({error.strerror}).") from error
    return replace(defaults, **chosen)  # type: ignore[arg-type]


def kind_of(named: set[str], where: str) -> Kind | None:
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
