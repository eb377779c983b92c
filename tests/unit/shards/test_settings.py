"""Settings records: what a field says is what is checked, wherever the record is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from shards.errors import PackError
from shards.settings import check_choices, parse_mix, required, set_path, settings_of


@dataclass(frozen=True, kw_only=True)
class Example:
    place: Annotated[str | Path, "Where."]
    size: Annotated[int | None, "How large."] = None
    side: Annotated[Literal["left", "right"] | None, "Which side."] = None
    names: Annotated[tuple[str, ...], "Who."] = ()
    inner: int = 3

    def __post_init__(self) -> None:
        set_path(self, "place")
        check_choices(self)


def test_a_field_says_its_type_help_and_allowed_values_once():
    found = settings_of(Example)
    assert list(found) == ["place", "size", "side", "names"]
    assert [setting.type for setting in found.values()] == [str, int, str, str]
    assert found["side"].choices == ("left", "right")
    assert found["names"].repeatable
    assert found["size"].help == "How large."
    assert required(Example) == ("place",)


def test_a_path_becomes_text_and_an_open_choice_stays_open():
    example = Example(place=Path("a/b"))
    assert example.place == "a/b"
    assert example.side is None


def test_a_value_that_is_not_allowed_names_those_that_are():
    with pytest.raises(PackError, match=r"`side`: 'top'; expected one of left, right\."):
        Example(place="a", side="top")


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", ()),
        ("web=0.7, code=0.3", (("web", 0.7), ("code", 0.3))),
        ("a=b=1", (("a=b", 1.0),)),
        ("web=1e-1", (("web", 0.1),)),
    ],
)
def test_a_mix_is_names_with_weights(text, pairs):
    assert parse_mix(text) == pairs


@pytest.mark.parametrize("text", ["web", "web=x", "=1", "web=1,"])
def test_a_part_of_a_mix_that_is_no_weight_is_shown(text):
    with pytest.raises(PackError, match=r"`mix`: .*; expected NAME=WEIGHT, such as web=0\.7,code=0\.3\."):
        parse_mix(text)
