"""Settings of a command: one frozen dataclass that says the name, type, help and allowed values of each setting once.

    seq_len: Annotated[int, "Capacity of a pack, in tokens."]
    truncate_side: Annotated[Literal["right", "left"], "Side that truncation cuts off."] = "right"

The command line makes its flags from such fields (`pipeline/cli.py`), and `check_choices` refuses a value that is not
allowed wherever the record is made, from Python too. Messages name a setting in backticks, as Python writes it:
`seq_len`, or `on_error="skip"`; the command line shows it as the flag: --seq-len, or --on-error skip.
"""

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from shards.errors import PackError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a settings record."""

    name: str
    type: type
    "Type of one value: int of `int | None`, str of `tuple[str, ...]`."
    help: str
    default: Any
    "MISSING where a value must be given."
    choices: tuple[str, ...]
    "Allowed values; empty where the type is all that is asked."
    repeatable: bool
    "Whether it holds several values."


def settings_of(record: type) -> dict[str, Setting]:
    """Return the fields of a settings record that carry a help text, by name, in their order."""
    hints = get_type_hints(record, include_extras=True)
    found = {}
    for field in fields(record):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, choices, repeatable = _unwrap(get_args(hint)[0])
        found[field.name] = Setting(
            name=field.name,
            type=kind,
            help=hint.__metadata__[0],
            default=field.default,
            choices=choices,
            repeatable=repeatable,
        )
    return found


def _unwrap(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    """Return the type of one value, the allowed values, and whether there may be several.

    `Literal["a", "b"] | None` gives (str, ("a", "b"), False); `tuple[str, ...]` gives (str, (), True).
    """
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint), False
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return (inner if isinstance(inner, type) else tuple), (), True
    return hint, (), False


def check_choices(record: Any) -> None:
    """Refuse a value that is none of the allowed ones of its field.

    Raises:
        PackError: Names the field, the value and what is allowed.
    """
    for setting in settings_of(type(record)).values():
        value = getattr(record, setting.name)
        if setting.choices and value not in setting.choices and (value is not None or setting.default is not None):
            raise PackError(f"`{setting.name}`: {value!r}; expected one of {', '.join(setting.choices)}.")


def set_path(record: Any, *names: str) -> None:
    """Turn the named path fields of a frozen record into text; None stays."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, Path):
            object.__setattr__(record, name, os.fspath(value))


def required(record: type) -> tuple[str, ...]:
    """Return the names of the fields that have no default."""
    return tuple(name for name, setting in settings_of(record).items() if setting.default is MISSING)


def read_settings(path: str | Path) -> dict[str, Any]:
    """Parse a file of settings: TOML, or JSON where its name ends so.

    Raises:
        PackError: It cannot be read, or is neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise PackError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error
    except ValueError as error:  # of both parsers, and for bytes that are no UTF-8
        raise PackError(f"{path}: is no settings file ({error}); expected lines such as seq_len = 4096.") from error
    if not isinstance(content, dict):
        raise PackError(f"{path}: holds no settings; expected an object of names and values.")
    return content


def check_settings(
    content: Mapping[str, Any],
    settings: Mapping[str, Setting],
    where: str,
    convert: Mapping[str, Callable[[str], Any]] | None = None,
) -> dict[str, Any]:
    """Return the values of a settings file as its record takes them; null stands for "not given".

    Args:
        content: What was parsed.
        settings: The settings that may be named.
        where: The file, for messages.
        convert: By setting, how text is turned into its value, such as "64MiB".

    Raises:
        PackError: An unknown name (the nearest is shown) or a value of another type.
    """
    values = {}
    for name, value in content.items():
        if name not in settings:
            near = get_close_matches(name, settings, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(settings)}."
            raise PackError(f"{where}: unknown setting {name!r}; expected the name of a flag, with _ for -. {hint}")
        if value is None:
            continue
        if isinstance(value, str) and name in (convert or {}):
            values[name] = (convert or {})[name](value)
        else:
            values[name] = _check_type(value, settings[name], where)
    return values


def _check_type(value: Any, setting: Setting, where: str) -> Any:
    if setting.repeatable:
        if not isinstance(value, list):
            raise PackError(f"{where}: {setting.name} is {value!r}; expected a list.")
        return tuple(tuple(one) if isinstance(one, list) else one for one in value)
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    fits = isinstance(value, (int, float) if setting.type is float else setting.type)
    if not fits or (isinstance(value, bool) and setting.type is not bool):
        raise PackError(f"{where}: {setting.name} is {value!r}; expected {kinds.get(setting.type, 'another type')}.")
    return value


def format_settings(values: Mapping[str, Any]) -> str:
    """Return settings as TOML that `read_settings` reads back; a mapping becomes a table."""
    plain = [f"{name} = {_toml(value)}" for name, value in values.items() if not isinstance(value, Mapping)]
    tables = []
    for name, table in values.items():
        for key, entries in table.items() if isinstance(table, Mapping) else ():
            lines = [f"{setting} = {_toml(value)}" for setting, value in entries.items()]
            tables.append("\n".join(["", f"[{name}.{_toml(key)}]", *lines]))
    return "\n".join([*plain, *tables])


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def parse_mix(text: str) -> tuple[tuple[str, float], ...]:
    """Parse weights of named sources, such as "web=0.7,code=0.3"; "" gives none.

    Raises:
        PackError: A part is not NAME=WEIGHT.
    """
    pairs = []
    for part in text.split(",") if text.strip() else []:
        name, _, weight = part.rpartition("=")
        try:
            pairs.append((name.strip(), float(weight)))
        except ValueError:
            name = ""
        if not name.strip():
            raise PackError(f"`mix`: {part.strip()!r}; expected NAME=WEIGHT, such as web=0.7,code=0.3.")
    return tuple(pairs)
