"""Options by source name from a TOML file."""

from pathlib import Path

import pytest

from pipeline.config import RecordOptions
from pipeline.recipe import read_template, refuse_idle, source_options
from shards.errors import PackError
from shards.settings import read_settings

DEFAULTS = RecordOptions(text_field="body", add_eos=False)


def read(tmp_path: Path, content: str) -> dict[str, RecordOptions]:
    path = tmp_path / "build.toml"
    path.write_text(content)
    return source_options(read_settings(path)["source"], DEFAULTS)


def test_a_table_replaces_what_it_names_and_the_kind_follows_from_its_fields(tmp_path):
    found = read(
        tmp_path,
        """
        [source.chat]
        messages_field = "talk"
        [source.web]
        overlong = "drop"
        """,
    )
    assert found == {
        "chat": RecordOptions(text_field="body", add_eos=False, kind="chat", messages_field="talk"),
        "web": RecordOptions(text_field="body", add_eos=False, overlong="drop"),
    }


def test_a_template_may_be_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    found = read(tmp_path, f"[source.a]\nchat_template = '{tmp_path / 't.jinja'}'\n")
    assert found["a"].chat_template == "{{ messages }}"
    assert read(tmp_path, "[source.a]\nchat_template = '{{ x }}'\n")["a"].chat_template == "{{ x }}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("source = 3", r"source: expected tables of options, such as \[source\.chat\]"),
        ("[source]\na = 3", r"source: expected tables of options"),
        ("[source.a", "is no settings file"),
        ("[source.a]\nfoo = 1", r"source 'a': unknown setting 'foo'; expected the name of a flag, with _ for -"),
        ("[source.a]\nadd_eos = 'no'", "source 'a': add_eos is 'no'; expected true or false"),
        ("[source.a]\ntext_unit = 'word'", "source 'a': `text_unit`: 'word'; expected one of file, line"),
        ("[source.a]\nkind = 'prose'", "source 'a': `kind`: 'prose'; expected one of text, chat, instruction"),
        ("[source.a]\ntruncate_side = 'top'", "source 'a': `truncate_side`: 'top'; expected one of right, left"),
        ("[source.a]\nchat_template = 'none.jinja'", r"chat_template none\.jinja: cannot be read"),
        ("[source.a]\ntext_field = 'a'\nprompt_field = 'b'", "prompt_field and text_field belong to"),
    ],
)
def test_what_a_recipe_cannot_say_is_one_line(tmp_path, content, message):
    with pytest.raises(PackError, match=message) as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_no_text_is_named(tmp_path):
    (tmp_path / "t.jinja").write_bytes(b"\xff{{ x }}")
    with pytest.raises(PackError, match=r"--chat-template .*t\.jinja: cannot be read .*Give a Jinja file in UTF-8"):
        read_template(str(tmp_path / "t.jinja"), "--chat-template")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": "{{ messages }}"}, "`chat_template`: plain text has no messages. Add `messages_field`"),
        ({"tools_field": "functions"}, "`tools_field`: plain text has no messages"),
        ({"train_template_tokens": True}, "`train_template_tokens`: plain text has no messages"),
        ({"truncate_side": "left"}, '`truncate_side="left"`: `overlong="auto"` truncates nothing'),
        ({"kind": "chat", "truncate_side": "left", "overlong": "drop"}, '`overlong="drop"` truncates nothing'),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, message):
    with pytest.raises(PackError, match=message):
        refuse_idle(RecordOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "chat", "chat_template": "{{ messages }}", "tools_field": "functions", "train_template_tokens": True},
        {"truncate_side": "left", "overlong": "truncate"},
    ],
)
def test_an_option_that_does_something_is_taken(options):
    refuse_idle(RecordOptions(**options))
