"""A build's settings: paths and sources as one writes them, and every choice checked where the record is made."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pipeline import PACKERS, BuildConfig, RecordOptions
from pipeline.building.cli import build
from pipeline.building.driver import BuildResult
from pipeline.cli import given, in_flags, main
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
        ({"kind": "prose"}, "`kind`: 'prose'; expected one of text, chat, instruction, tokens."),
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
    for name in ("as_json", "config", "print_config"):
        context.params.pop(name)
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


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[BuildConfig]:
    """What `pack build` asked for."""
    caught: list[BuildConfig] = []

    def catch(config: BuildConfig, progress: Any) -> BuildResult:
        caught.append(config)
        return BuildResult(path="d", plan_id="", manifest=None)

    monkeypatch.setattr("pipeline.building.driver.build", catch)
    return caught


FILE = """
sources = ["web=a.jsonl", "chat=b.jsonl"]
out = "d"
tokenizer = "t"
seq_len = 128
window_bytes = "64KiB"
add_eos = false
workers = 3
[source.chat]
messages_field = "talk"
"""


def test_a_file_gives_what_flags_do_not_and_flags_win(tmp_path, built):
    (tmp_path / "build.toml").write_text(FILE)
    assert run("build", "--config", tmp_path / "build.toml", "--seq-len", 256).exit_code == 0
    common = RecordOptions(add_eos=False)
    chat = RecordOptions(add_eos=False, kind="chat", messages_field="talk")
    assert built == [
        BuildConfig(
            sources=("web=a.jsonl", "chat=b.jsonl"), out="d", tokenizer="t", seq_len=256, window_bytes=64 << 10,
            workers=3, records=common, source_records={"chat": chat},
        )
    ]  # fmt: skip


def test_printed_settings_are_such_a_file(tmp_path, built):
    (tmp_path / "build.toml").write_text(FILE)
    flags = ("--max-rejected", 0.5, "--text-field", 'a "b"\\c')
    printed = run("build", "--config", tmp_path / "build.toml", *flags, "--print-config")
    assert built == []
    (tmp_path / "again.toml").write_text(printed.output)
    run("build", "--config", tmp_path / "build.toml", *flags)
    run("build", "--config", tmp_path / "again.toml")
    assert built[0] == built[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "seq_length = 3",
            "unknown setting 'seq_length'; expected the name of a flag, with _ for -. Did you mean seq_len?",
        ),
        ("seq_len = '4k'", "seq_len is '4k'; expected a whole number."),
        ("seq_len = true", "seq_len is True; expected a whole number."),
        ("max_rejected = 'all'", "max_rejected is 'all'; expected a number."),
        ("resume = 1", "resume is 1; expected true or false."),
        ("sources = 'a.jsonl'", "sources is 'a.jsonl'; expected a list."),
        ("seq_len = ", "is no settings file"),
    ],
)
def test_a_line_that_sets_nothing_is_named(tmp_path, line, message):
    (tmp_path / "build.toml").write_text(line)
    result = run("build", "c.jsonl", "--config", tmp_path / "build.toml")
    assert result.exit_code == 1
    assert message in result.stderr
    assert str(tmp_path / "build.toml") in result.stderr


@pytest.mark.parametrize("missing", ["sources", "out", "seq_len"])
def test_what_neither_gives_is_a_usage_error(tmp_path, missing):
    lines = [line for line in FILE.splitlines() if not line.startswith(missing)]
    (tmp_path / "build.toml").write_text("\n".join(lines))
    result = run("build", "--config", tmp_path / "build.toml")
    assert result.exit_code == 2
    assert f"Missing {'argument' if missing == 'sources' else 'option'}" in result.stderr


def test_a_build_without_tokenizer_and_vocabulary_says_which_two_there_are(tmp_path):
    lines = [line for line in FILE.splitlines() if not line.startswith("tokenizer")]
    (tmp_path / "build.toml").write_text("\n".join(lines))
    result = run("build", "--config", tmp_path / "build.toml")
    assert (result.exit_code, "--tokenizer, --vocab-size: are not given; expected one" in result.stderr) == (1, True)
