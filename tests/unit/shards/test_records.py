"""Parsed JSON against the types that code reads it with."""

from typing import Any, NotRequired, TypedDict

import pytest

from shards.records import mismatch


class Inner(TypedDict):
    """A record in a record."""

    n: int


class Outer(TypedDict):
    """One of each kind."""

    name: str
    rows: list[list[int]]
    ids: list[int]
    inner: Inner
    share: float
    maybe: int | None
    flag: bool
    more: NotRequired[str]


GOOD: dict[str, Any] = {
    "name": "a",
    "rows": [[1, 2], []],
    "ids": [3],
    "inner": {"n": 1, "unknown": "x"},
    "share": 1,
    "maybe": None,
    "flag": True,
}


@pytest.mark.parametrize(
    "changes", [{}, {"share": 0.5}, {"maybe": 7}, {"more": "x"}, {"rows": []}, {"ids": [-(1 << 63), (1 << 63) - 1]}]
)
def test_what_fits_has_no_mismatch(changes):
    assert mismatch(GOOD | changes, Outer) is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"name": 1}, "name is a int; expected str"),
        ({"ids": [1, "2"]}, "ids[1] is a str; expected int"),
        ({"ids": [True]}, "ids[0] is a bool; expected int"),
        ({"ids": [1.5]}, "ids[0] is a float; expected int"),
        ({"ids": 1}, "ids is a int; expected list"),
        ({"rows": [[1], 2]}, "rows[1] is a int; expected list"),
        ({"rows": [[1], [False]]}, "rows[1][0] is a bool; expected int"),
        ({"rows": [[1], [None]]}, "rows[1][0] is a NoneType; expected int"),
        ({"inner": {}}, "inner.n is missing"),
        ({"inner": {"n": True}}, "inner.n is a bool; expected int"),
        ({"inner": []}, "inner is a list; expected an object"),
        ({"share": True}, "share is a bool; expected float"),
        ({"flag": 1}, "flag is a int; expected bool"),
        ({"more": 1}, "more is a int; expected str"),
        ({"ids": [3, 1 << 63]}, "ids[1] is 9223372036854775808; expected a number of 64 bits"),
        ({"rows": [[1], [-1 - (1 << 63)]]}, "rows[1][0] is -9223372036854775809; expected a number of 64 bits"),
        ({"inner": {"n": 1 << 90}}, "inner.n is 1237940039285380274899124224; expected a number of 64 bits"),
        ({"share": float("inf")}, "share is inf; expected a finite number"),
        ({"share": float("nan")}, "share is nan; expected a finite number"),
        ({"share": 1 << 63}, "share is 9223372036854775808; expected a number of 64 bits"),
    ],
)
def test_the_first_mismatch_is_named_by_its_place(changes, found):
    assert mismatch(GOOD | changes, Outer) == found
