"""Templates as models ship them, message by message: reasoning, tools, control text, unicode at borders.

The definition is transformers' own rendering of the first messages. Every part of a conversation holds a mark of its
own (`c3` in the content of message 3), so that a refusal can be checked too: what a template is said to leave out is
nowhere in its text.
"""

import json
import re
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from chats import batch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker

FOLDER = Path(next(iter(trl.__path__))) / "chat_templates"
NAMES = ("deepseekv3", "gemma3", "gptoss", "llama3_1", "qwen2_5", "qwen3", "qwen3_training")
MARKS = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>",
    "<|call|>", "<|constrain|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>",
    "<think>", "</think>", "<tool_call>", "</tool_call>",
)  # fmt: skip
SPELLED = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<｜Assistant｜>")  # none that a template looks for
WORDS = st.sampled_from(["Paris", " is", "\n", "  ", "é", "한", "👍\u200d", "\u0301", ".", "<", "|im", *SPELLED])
TEXT = st.lists(WORDS, max_size=5).map("".join)
WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "d"}}, "required": ["word"]}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": WORD}}
EMPTY_BLOCK = "<think>\n\n</think>\n\n"
KINDS = ("plain", "plain", "reasoning", "call", "calls", "text and call", "reasoning and call")


@st.composite
def talks(draw: st.DrawFn) -> dict[str, Any]:
    """Conversations of all that a template may know."""
    talk: list[dict[str, Any]] = []

    def say(role: str, **more: Any) -> None:
        talk.append(
            {"role": role, "content": f"c{len(talk)} {draw(TEXT)}." if more.pop("speaks", True) else "", **more}
        )

    if draw(st.booleans()):
        say(draw(st.sampled_from(["system", "developer"])) if draw(st.booleans()) else "system")
    with_tools = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        say("user")
        kind = draw(st.sampled_from(KINDS)) if with_tools else draw(st.sampled_from(KINDS[:3]))
        at = len(talk)
        thoughts = {"reasoning_content": f"r{at} {draw(TEXT)}."} if "reasoning" in kind else {}
        if "call" not in kind:
            say("assistant", **thoughts)
            continue
        calls = [
            {"type": "function", "id": f"call0000{n}", "function": {"name": "look_up", "arguments": {"word": f"a{at}"}}}
            for n in range(2 if kind == "calls" else 1)
        ]
        say("assistant", tool_calls=calls, speaks="text" in kind, **thoughts)
        for call in calls:
            say("tool", tool_call_id=call["id"], name="look_up")
        say("assistant")
    return {"messages": talk, **({"tools": [TOOL]} if with_tools and draw(st.booleans()) else {})}


@pytest.fixture(scope="module")
def full(tokenizer_dir: str) -> Tokenizer:
    """The tokenizer of the tests with the control tokens of all these models."""
    tokenizer = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return tokenizer


@pytest.fixture(scope="module")
def encoder(tokenizer_dir: str, full: Tokenizer) -> Encoder:
    config = json.loads(Path(tokenizer_dir, "tokenizer_config.json").read_text())
    return Encoder({"tokenizer.json": full.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()})


@cache
def template(name: str) -> str:
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return re.sub(r"strftime_now\('[^']*'\)|strftime_now\(\"[^\"]*\"\)", "'26 Jul 2024'", text)


@cache
def maker_of(encoder: Encoder, name: str) -> DocumentMaker:
    return DocumentMaker(encoder, RecordOptions(kind="chat", chat_template=template(name), add_eos=False))


def rendered(name: str, talk: list[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
    """Render as transformers does, in the forms that the template's authors give it."""
    messages = []
    for message in talk:
        message = dict(message)
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
        if "tool_calls" in message and name == "deepseekv3":
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        messages.append(message)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return render_jinja_template(
        [messages], tools=tools, chat_template=template(name), add_generation_prompt=prompt, **tokens
    )[0][0]


def tokens_of(text: str, talk: list[dict[str, Any]], full: Tokenizer, encoder: Encoder) -> tuple[list[int], Any]:
    """Encode a rendering in which contents spell control tokens: those alone are text; return ids and offsets."""
    hidden = text
    for message in talk:
        for part in (message["content"], message.get("reasoning_content", "")):
            for shown in (part, part.strip(), json.dumps(part, ensure_ascii=False)[1:-1]):
                hidden = hidden.replace(shown, shown.replace("<", "\ue000")) if shown else hidden
    added, ids, offsets, at = full.get_added_tokens_decoder(), [], [], 0
    texts = sorted((token.content for token in added.values()), key=len, reverse=True)
    for match in [*re.finditer("|".join(map(re.escape, texts)), hidden), None]:
        stop = len(text) if match is None else match.start()
        if at < stop:
            chunk, spans = encoder.encode_with_spans(text[at:stop])
            ids += chunk.tolist()
            offsets += (spans + at).tolist()
        if match is not None:
            ids.append(full.token_to_id(match[0]))
            offsets.append([*match.span()])
            at = match.end()
    return ids, np.array(offsets)


def check_refusal(name: str, reason: str, talk: list[dict[str, Any]], tools: Any) -> None:
    """Check that what a refusal says of the template is so."""
    texts: dict[int, str] = {}
    for count in range(1, len(talk) + 1):
        with suppress(TemplateError, TypeError):
            texts[count] = rendered(name, talk[:count], tools)
    if left := re.search(r"leaves out (\w+) of message (\d+)", reason):
        mark = {"content": "c", "reasoning_content": "r", "tool_calls": "a"}[left[1]] + left[2]
        assert any(not re.search(rf"\b{mark}\b", text) for count, text in texts.items() if count > int(left[2]))
    elif "leaves out the tools" in reason:
        assert rendered(name, talk, tools) == rendered(name, talk, None)
    elif "rewrites earlier turns" in reason:
        assert any(not long.startswith(short) for short, long in pairwise(texts.values()))
    else:
        assert "the chat template refuses it" in reason
        with pytest.raises((TemplateError, TypeError)):
            [
                rendered(name, talk[:count], tools, prompt)
                for count in texts | {len(talk): ""}
                for prompt in (False, True)
            ]


def answer_start(name: str, text: str, talk: list[Any], index: int, tools: Any) -> int | None:
    """Return where an answer begins: behind the prompt of a generation, or where that parts from the text.

    A prompt may open the reasoning of an answer that has none in the text.
    """
    prompt, before = rendered(name, talk[:index], tools, prompt=True), rendered(name, talk[:index], tools)
    if text.startswith(prompt):
        return len(prompt)
    if not text.startswith(before):
        return None
    shared = next((n for n, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1]), len(prompt))
    own = re.search(rf"\b[cr]{index} ", text[len(before) :])
    return shared if own is None else min(shared, len(before) + own.start())


def check_document(
    name: str, ids: Any, mask: Any, talk: list[Any], tools: Any, full: Tokenizer, encoder: Encoder
) -> set:
    """Check one document against the renderings of its first messages; return the answers that are trained in it."""
    for count in range(len(talk), 0, -1):
        text = rendered(name, talk[:count], tools)
        wanted, offsets = tokens_of(text, talk[:count], full, encoder)
        if wanted == ids:
            break
    else:
        raise AssertionError(f"{full.decode(ids, skip_special_tokens=False)!r} is no rendering of the first messages")
    found, trained, allowed = np.flatnonzero(mask), set(), np.zeros(len(ids), bool)
    for index, message in enumerate(talk[:count]):
        if message["role"] != "assistant":
            continue
        start = answer_start(name, text, talk, index, tools)
        if start is None:  # an earlier turn that reads otherwise
            continue
        alone = rendered(name, talk[: index + 1], tools)
        if text[start:].startswith(EMPTY_BLOCK):
            start += len(EMPTY_BLOCK)
        if not text.startswith(alone):
            continue
        own = (offsets[:, 0] < len(alone.rstrip())) & (offsets[:, 1] > start)
        if own[found].any():
            assert mask[own].all(), "of an answer all is trained, its end mark included"
            trained.add(index)
            allowed |= own
    assert allowed[found].all(), "nothing else is trained"
    return trained


@given(record=talks(), name=st.sampled_from(NAMES))
def test_documents_are_renderings_and_each_answer_is_trained_once_or_truly_refused(encoder, full, record, name):
    rejected: dict[int, str] = {}
    documents, _ = maker_of(encoder, name).make(batch([record], rejected.__setitem__))
    talk, tools = record["messages"], record.get("tools")
    if rejected:
        check_refusal(name, rejected[0], talk, tools)
        return
    trained: list[int] = []
    for start, stop in pairwise(documents.offsets.tolist()):
        ids, mask = documents.input_ids[start:stop].tolist(), documents.mask_of(start, stop) > 0
        trained += sorted(check_document(name, ids, mask, talk, tools, full, encoder))
    assert trained == [index for index, message in enumerate(talk) if message["role"] == "assistant"]


def test_the_property_is_not_about_nothing(encoder):
    """Each template takes plain talks of several turns, and those that know tools take calls."""
    ask, reply = {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}
    call = {"type": "function", "id": "call00001", "function": {"name": "look_up", "arguments": {"word": "a"}}}
    called = [ask, reply | {"content": "", "tool_calls": [call]}, {"role": "tool", "content": "e"}, reply]
    taken = {
        name: [
            not maker_of(encoder, name).make(batch([record], rejected.__setitem__))[1] and not rejected
            for record in ({"messages": [ask, reply, ask, reply]}, {"messages": called, "tools": [TOOL]})
            if (rejected := dict[int, str]()) is not None
        ]
        for name in NAMES
    }
    assert all(plain for plain, _ in taken.values())
    assert sum(tools for _, tools in taken.values()) >= 4
