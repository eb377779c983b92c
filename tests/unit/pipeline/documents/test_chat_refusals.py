"""Conversations and templates that are refused, and what is said of them."""

import pytest
from chats import AGAIN, ASK, REPLY, TALK, TEMPLATES, batch, make, one

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from shards.errors import PackError, SourceError


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": []}, "no field 'messages', only 'conversations'.*`messages_field=.conversations"),
        ({"prompt": "a", "completion": "b"}, "no field 'messages'.*Use `prompt_field=.prompt.` and `completion_field="),
        ({"text": "a"}, "no field 'messages', only 'text'.*Name the field with --messages-field"),
        ({"messages": None}, "field 'messages' is null; expected a list of messages"),
        ({"messages": "Hi"}, "field 'messages' is text .'Hi'.; expected a list of messages"),
        ({"messages": ["Hi"]}, "message 0: text .'Hi'.; expected an object"),
        ({"messages": [{"content": "Hi"}]}, "message 0: no role, only 'content'"),
        ({"messages": [{"role": 5, "content": "Hi"}]}, r"message 0: the role is a number \(5\); expected a name"),
        ({"messages": [{"role": None, "content": "Hi"}]}, "message 0: the role is null; expected a name"),
        ({"messages": [{"from": ["user"], "value": "Hi"}]}, "message 0: the role is a list; expected a name"),
        (
            {"messages": [{"role": "", "content": "Hi"}]},
            r"message 0: the role is text \(''\); expected a name, such as",
        ),
        ({"messages": [{"role": "user"}]}, "message 0: no content, only 'role'"),
        ({"messages": [ASK, {"role": "assistant", "content": 4}]}, "message 1: content holds a number .4."),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "a part of type 'image'"),
        ({"messages": [ASK, REPLY | {"weight": 0.5}]}, "message 1: weight is 0.5; expected 0 or 1"),
        ({"messages": [ASK, REPLY | {"train": "no"}]}, "message 1: train is 'no'; expected true or false"),
        ({"messages": [ASK, REPLY | {"tool_calls": 3}]}, "message 1: tool_calls is a number .3."),
        ({"messages": [ASK, REPLY | {"tool_calls": [{"id": "1"}]}]}, "message 1: a tool call has no name"),
        ({"messages": [ASK, REPLY], "tools": "add"}, "the tools are text .'add'."),
    ],
)
def test_a_record_of_another_form_is_refused_by_name(encoder, record, message):
    with pytest.raises(SourceError, match=f"^record 0: .*{message}"):
        make(encoder, [record], "chatml")


def test_what_the_template_refuses_is_named(encoder):
    with pytest.raises(SourceError, match=r"the chat template refuses it \(roles must alternate\)"):
        one(encoder, [ASK, AGAIN], "instruct")


def test_bad_records_can_be_listed_instead(encoder, full):
    records = [{"messages": [ASK, AGAIN]}, {"messages": []}, {"messages": [ASK, REPLY]}]
    template = (TEMPLATES / "instruct.jinja").read_text(encoding="utf-8")
    options = RecordOptions(kind="chat", chat_template=template)
    rejected = {}
    documents, drops = DocumentMaker(encoder, options).make(batch(records, rejected.__setitem__))
    assert documents.doc_ids.tolist() == [2]
    assert list(rejected) == [0]
    assert rejected[0].startswith("the chat template refuses it (roles must alternate)")
    assert drops == {"empty": 1}


def test_generation_marks_in_the_wrong_place_are_refused(encoder):
    with pytest.raises(SourceError, match="generation %} block of the chat template does not hold one assistant"):
        one(encoder, TALK, "misplaced")


def test_a_tokenizer_without_a_template_says_so(bos_tokenizer_dir):
    with pytest.raises(PackError, match="no chat template; expected one for conversations"):
        make(Encoder(bos_tokenizer_dir), [{"messages": [ASK, REPLY]}])


def test_a_broken_template_is_named_with_its_line(encoder):
    options = RecordOptions(kind="chat", chat_template="{{ bos_token }}\n{% for %}")
    with pytest.raises(PackError, match="chat template, line 2: "):
        DocumentMaker(encoder, options).make(batch([{"messages": [ASK, REPLY]}]))


def test_conversations_have_no_completion(encoder):
    with pytest.raises(PackError, match="--train-on completion: a conversation has no completion"):
        one(encoder, TALK, "chatml", train_on="completion")
