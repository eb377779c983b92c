"""Nothing that reaches a terminal through `printable` steers it."""

import sys
import unicodedata

import pytest

from shards.text import printable

STEERING = {"Cc", "Cs", "Zl", "Zp"}  # controls, surrogates, line and paragraph separators
REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # what Unicode calls explicit marks
IMPLICIT = "\u200e\u200f\u061c"


def steers(letter: str) -> bool:
    return (
        unicodedata.category(letter) in STEERING
        or unicodedata.bidirectional(letter) in REORDERING
        or letter in IMPLICIT
    )


def test_of_all_code_points_those_that_steer_are_replaced_and_no_others():
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    replaced = [letter for letter in every if printable(letter) != letter]
    assert replaced == [letter for letter in every if steers(letter)]
    assert not any(steers(letter) for letter in printable("".join(every)))


def test_text_of_several_lines_keeps_its_lines_and_tabs():
    assert printable("a\n\tb\x1b[2J\r", lines=True) == "a\n\tb␛[2J␍"
    assert printable("a\nb") == "a␊b"


@pytest.mark.parametrize(("name", "shown"), [("a\udcff", "a\\xff"), ("\x9b31m", "\\x9b31m"), ("\u202eb", "\\u202eb")])
def test_what_is_replaced_can_be_told(name, shown):
    assert printable(name) == shown
    shown.encode("utf-8")
