"""A build's settings: paths and sources as one writes them, and every choice checked where the record is made."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from pipeline import PACKERS, BuildConfig, RecordOptions
from pipeline.cli import build, given, in_flags
from pipeline.config import PACKER_NAMES
from shards.errors import PackError


def config(**changes: Any) -> BuildConfig:
    settings: dict[str, Any] = {"sources": ("c.jsonl",), "out": "d", "tokenizer": "t", "seq_len": 128}
    return BuildConfig(**settings | changes)


@pytest.mark.parametrize("sources", ["corpus.jsonl", Path("corpus.jsonl"), ["corpus.jsonl"], (Path("corpus.jsonl"),)])
def test_a_lone_source_and_paths_are_taken_as_they_are(sources):
    assert config(sources=sources) == config(sources=("corpus.jsonl",))


def test_paths_become_text():
    made = config(out=Path("a/out"), tokenizer=Path("a/tokenizer"))
    assert (made.out, made.tokenizer) == ("a/out", "a/tokenizer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_error": "stop"}, "`on_error`: 'stop'; expected one of fail, skip."),
        ({"engine": "spark"}, "`engine`: 'spark'; expected one of local, ray."),
        ({"packer": "best"}, f"`packer`: 'best'; expected one of {', '.join(PACKER_NAMES)}."),
        (
            {"tokenizer_engine": "y"},
            "`tokenizer_engine`: 'y'; expected one of auto, tokenizers, fastokens, gigatoken.",
        ),
        ({"seq_len": 1}, "`seq_len`: 1; expected 2 to 16,777,216 tokens."),
        ({"sources": ()}, "`sources`: is empty; expected at least one SOURCE."),
        ({"out": ""}, "`out`: is an empty string; expected a directory or an fsspec URL. Is a shell variable unset?"),
        ({"resume": True, "overwrite": True}, "`resume=True` and `overwrite=True`: choose one."),
        ({"windows": "4::4"}, "`windows`: '4::4'; expected i::n with 0 <= i < n, such as 3::16."),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_argument(changes, message):
    with pytest.raises(PackError) as caught:
        config(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "prose"}, "`kind`: 'prose'; expected one of text, chat, instruction."),
        ({"overlong": "cut"}, "`overlong`: 'cut'; expected one of auto, split, truncate, truncate-turns, drop, error."),
        ({"truncate_side": "top"}, "`truncate_side`: 'top'; expected one of right, left."),
        ({"text_unit": "word"}, "`text_unit`: 'word'; expected one of file, line."),
    ],
)
def test_options_of_records_are_checked_alike(options, message):
    with pytest.raises(PackError) as caught:
        RecordOptions(**options)
    assert str(caught.value) == message


def test_the_names_of_packers_are_those_that_there_are():
    assert {*PACKERS, "wrapped"} == set(PACKER_NAMES)


def test_every_setting_of_a_build_is_a_flag():
    flags = {parameter.name for parameter in build.params}
    settings = {field.name for record in (BuildConfig, RecordOptions) for field in fields(record)}
    assert settings - flags == {"records", "source_records", "kind"}


def test_flags_that_are_not_written_leave_the_records_own_defaults():
    context = build.make_context("build", ["c.jsonl", "--out", "d", "--tokenizer", "t", "--seq-len", "128"])
    context.params.pop("as_json")
    assert given(context.params) == {"sources": ("c.jsonl",), "out": "d", "tokenizer": "t", "seq_len": 128}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`seq_len`: 1; expected 2.", "--seq-len: 1; expected 2."),
        ("`resume=True` and `overwrite=True`: choose one.", "--resume and --overwrite: choose one."),
        ('Add `on_error="skip"`.', "Add --on-error skip."),
        ("`add_eos=False`: no", "--no-eos: no"),
        ("`sources`: is empty", "SOURCE: is empty"),
        ("`elsewhere`: stays", "`elsewhere`: stays"),
    ],
)
def test_the_command_line_shows_arguments_as_flags(message, shown):
    assert isinstance(build, click.Command)
    assert in_flags(message, build) == shown
