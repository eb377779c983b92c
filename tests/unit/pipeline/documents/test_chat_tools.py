"""Conversations with tools: schemas, calls and replies, and the templates for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import ANSWERS, ASK, ASK_TEXT, CALL, REPLY, TEMPLATES, TOOL, USER, batch, expected, make, one

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.documents.tokenizer import load_spec
from shards.errors import PackError, SourceError


class TestTools:
    """Schemas, calls and replies."""

    CALLS = (ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, REPLY)
    SHOWN = '<call>{"name": "add", "arguments": {"a": 1, "b": "two"}}</call><|im_end|>'

    def text(self) -> str:
        return (
            f"<|im_start|>system\nTools:\n{json.dumps(TOOL)}<|im_end|>\n{ASK_TEXT}{self.SHOWN}\n"
            "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
        )

    def test_schemas_come_once_calls_are_targets_and_replies_are_not(self, encoder, full):
        made = one(encoder, self.CALLS, "chatml", record={"tools": [TOOL]})
        assert made == expected(full, self.text(), self.SHOWN, ANSWERS[0])
        assert full.decode(made[0], skip_special_tokens=False).count("Add numbers") == 1

    @pytest.mark.parametrize("form", ["arguments as text", "function_call", "all as text"])
    def test_json_text_and_objects_are_alike(self, encoder, full, form):
        arguments = '{"a":1,"b":"two"}'
        call: dict[str, Any] = CALL | {"function": {"name": "add", "arguments": arguments}}
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        if form == "function_call":
            message = {"role": "assistant", "content": None, "function_call": call["function"]}
        if form == "all as text":
            message["tool_calls"] = json.dumps([call])
        tools = json.dumps([TOOL]) if form == "all as text" else [TOOL]
        made = one(encoder, [ASK, message, *self.CALLS[2:]], "chatml", record={"tools": tools})
        assert made == expected(full, self.text(), self.SHOWN, ANSWERS[0])

    def test_a_template_may_want_null_content_and_arguments_as_text(self, encoder, full):
        shown = '!add {"a": 1, "b": "two"}<|im_end|>'
        text = ASK_TEXT + shown + "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
        assert one(encoder, self.CALLS, "null_calls") == expected(full, text, shown, ANSWERS[0])

    @pytest.mark.parametrize(
        ("message", "what"),
        [
            ({"content": None, "tool_calls": [CALL]}, "tool_calls of message 1"),
            ({"content": "Look.", "tool_calls": [CALL]}, "tool_calls of message 1"),
        ],
    )
    def test_calls_that_the_template_leaves_out_are_not_lost_without_a_word(self, encoder, message, what):
        with pytest.raises(SourceError, match=f"leaves out {what}"):
            one(encoder, [ASK, {"role": "assistant", **message}], "trims")

    def test_schemas_that_the_template_leaves_out_are_not_lost_without_a_word(self, encoder):
        with pytest.raises(SourceError, match="leaves out the tools"):
            one(encoder, [ASK, REPLY], "trims", record={"tools": [TOOL]})


@pytest.mark.parametrize("train_on", ["last-assistant", "all"])
def test_contents_that_the_template_leaves_out_are_missed_in_turns_that_are_not_trained_too(encoder, train_on):
    talk = [
        ASK,
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        REPLY,
    ]
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ (m.tool_calls | tojson) if m.tool_calls else m.content }}<|im_end|>{% endfor %}"
    )
    options = RecordOptions(kind="chat", chat_template=text, train_on=train_on)
    with pytest.raises(SourceError, match="leaves out content of message 1"):
        DocumentMaker(encoder, options).make(batch([{"messages": talk}]))


class TestNamedTemplates:
    """A tokenizer with several templates; transformers takes `tool_use` where there are tools."""

    @pytest.fixture
    def named(self, tokenizer_dir, tmp_path):
        def write(**templates: str) -> Encoder:
            files = {file.name: file.read_bytes() for file in Path(tokenizer_dir).iterdir()}
            config = json.loads(files["tokenizer_config.json"])
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
            return Encoder(files | {"tokenizer_config.json": json.dumps(config).encode()})

        return write

    def test_records_with_tools_are_rendered_by_the_one_for_tools(self, named, full):
        chatml, plain = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("chatml", "no_marks"))
        encoder = named(default=plain, tool_use=chatml)
        documents = make(encoder, [{"messages": [ASK, REPLY]}, {"messages": [ASK, REPLY], "tools": [TOOL]}])
        first, second = np.split(documents.input_ids, documents.offsets[1:-1])
        assert full.decode(first, skip_special_tokens=False) == f"User: {USER}\nAssistant: Paris.\n</s>"
        assert (
            second.tolist()
            == full.encode(
                f"<|im_start|>system\nTools:\n{json.dumps(TOOL)}<|im_end|>\n{ASK_TEXT}Paris.<|im_end|>\n"
            ).ids
        )

    def test_templates_of_which_none_is_the_default_are_named(self, named):
        with pytest.raises(PackError, match="names the chat templates rag, tool_use, and none of them is the default"):
            make(named(rag="{{ messages }}", tool_use="{{ messages }}"), [{"messages": [ASK, REPLY]}])

    def test_templates_in_files_of_their_own_are_those_of_the_configuration(self, tokenizer_dir, full, tmp_path):
        """transformers saves several templates as chat_template.jinja and a folder of others."""
        from transformers import AutoTokenizer

        chatml, plain = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("chatml", "no_marks"))
        saved = AutoTokenizer.from_pretrained(tokenizer_dir)
        saved.chat_template = {"default": plain, "tool_use": chatml}
        saved.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "additional_chat_templates" / "tool_use.jinja").is_file()
        spec, files = load_spec(str(tmp_path / "saved"))
        assert (spec.chat_template, dict(spec.named_templates)) == (plain, {"tool_use": chatml})
        record = {"messages": [ASK, REPLY], "tools": [TOOL]}
        head = f"<|im_start|>system\nTools:\n{json.dumps(TOOL)}<|im_end|>\n"
        assert (
            make(Encoder(files), [record]).input_ids.tolist() == full.encode(f"{head}{ASK_TEXT}Paris.<|im_end|>\n").ids
        )
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert again.chat_template == saved.chat_template
