"""Check parsed JSON against the TypedDict that describes it, so that code which reads it can trust its types."""

import math
import types
from functools import cache
from itertools import chain
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

BOUND = 1 << 63  # of whole numbers on either side: what is read is counted in int64


def mismatch(value: Any, kind: Any, where: str = "") -> str | None:
    """Return where a JSON value is not what a type says, or None.

    Whole numbers have to fit 64 bits, and others have to be finite.

    Args:
        value: What `json.loads` returned.
        kind: A TypedDict, list[...], dict[str, ...], a union, int, float, str, bool, None or Any. A TypedDict may have
            more keys than it names.
        where: The value's place, for the answer.

    Example:
        `mismatch({"a": [1, "2"]}, A)`, where A has `a: list[int]`, returns "a[1] is a str; expected int".
    """
    if kind is Any or (type(value) is kind and kind not in (int, float)) or _is_table(value, kind):
        return None
    origin = get_origin(kind)
    if is_typeddict(kind):
        return _record_mismatch(value, kind, where)
    if origin in (Union, types.UnionType):
        problems = [mismatch(value, choice, where) for choice in get_args(kind)]
        return None if None in problems else problems[0]
    if origin is list and isinstance(value, list):
        (inner,) = get_args(kind)
        if inner is str and all(type(item) is str for item in value):
            return None
        found = (mismatch(item, inner, f"{where}[{place}]") for place, item in enumerate(value))
        return next((problem for problem in found if problem), None)
    if origin is dict and isinstance(value, dict):
        inner = get_args(kind)[1]
        found = (mismatch(item, inner, f"{where}.{key}" if where else key) for key, item in value.items())
        return next((problem for problem in found if problem), None)
    expected = origin or kind
    fits = isinstance(value, (int, float) if expected is float else expected)
    if not fits or (expected is not bool and isinstance(value, bool)):
        return f"{where or 'the file'} is a {type(value).__name__}; expected {getattr(expected, '__name__', expected)}"
    if isinstance(value, int) and not -BOUND <= value < BOUND:
        return f"{where or 'the file'} is {str(value)[:40]}; expected a number of 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where or 'the file'} is {value}; expected a finite number"
    return None


def _is_table(value: Any, kind: Any) -> bool:
    """Tell rows of whole numbers at a glance: in 100,000 sidecars, they are nearly all there is to check."""
    if kind != list[list[int]] or type(value) is not list:
        return False
    if not all(type(row) is list for row in value) or not set(map(type, chain.from_iterable(value))) <= {int}:
        return False
    numbers = list(chain.from_iterable(value))
    return min(numbers, default=0) >= -BOUND and max(numbers, default=0) < BOUND


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a TypedDict's fields, without NotRequired around them."""
    return get_type_hints(kind)


def uneven(rows: list[list[int]], width: int, where: str) -> str | None:
    """Return which row of a table in JSON has not `width` numbers of 0 or more, or None."""
    for place, row in enumerate(rows):
        if len(row) != width or min(row) < 0:
            return f"{where}[{place}] is {str(row)[:60]}; expected {width} numbers of 0 or more"
    return None


def _record_mismatch(value: Any, kind: Any, where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where or 'the file'} is a {type(value).__name__}; expected an object"
    missing = sorted(kind.__required_keys__ - value.keys())
    if missing:
        return f"{where + '.' if where else ''}{missing[0]} is missing"
    hints = _hints(kind)
    found = (
        mismatch(value[key], hint, f"{where}.{key}" if where else key) for key, hint in hints.items() if key in value
    )
    return next((problem for problem in found if problem), None)
