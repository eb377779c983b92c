"""What a chat template does with conversations of every kind, and which conversations of a corpus it takes.

Small conversations, one for each thing that templates treat differently, go the way that records of a build go, so what
is said here is what a build would do. Nothing is written. Add a kind of conversation as an entry of `CASES`.
"""

import re
from collections import Counter
from typing import Any, TypedDict

from pipeline.config import RecordOptions
from pipeline.documents.chat import Rendering
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.documents.messages import chat_conversation
from pipeline.estimate.sampling import CHUNK_BYTES, draw_places, read_chunks
from pipeline.sources.discovery import resolve_sources
from shards.errors import SourceError

ASK, AGAIN = {"role": "user", "content": "first question"}, {"role": "user", "content": "second question"}
REPLY, LAST = {"role": "assistant", "content": "first answer"}, {"role": "assistant", "content": "second answer"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"word": "some"}}}
OTHER = {"id": "call00002", "type": "function", "function": {"name": "look_up", "arguments": {"word": "other"}}}
RESULT = {"role": "tool", "content": "a result", "tool_call_id": "call00001", "name": "look_up"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
CASES: dict[str, dict[str, Any]] = {
    "one answer": {"messages": [ASK, REPLY]},
    "several answers": {"messages": [ASK, REPLY, AGAIN, LAST]},
    "system prompt": {"messages": [{"role": "system", "content": "system prompt"}, ASK, REPLY]},
    "developer role": {"messages": [{"role": "developer", "content": "system prompt"}, ASK, REPLY]},
    "two questions in a row": {"messages": [ASK, AGAIN, REPLY]},
    "white space around an answer": {"messages": [ASK, {"role": "assistant", "content": "  first answer\n"}]},
    "reasoning": {"messages": [ASK, REPLY | {"reasoning_content": "some thoughts"}]},
    "reasoning in several answers": {
        "messages": [
            ASK, REPLY | {"reasoning_content": "some thoughts"}, AGAIN, LAST | {"reasoning_content": "more thoughts"},
        ]
    },
    "tool call and result": {
        "messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, REPLY], "tools": TOOLS,
    },
    "text beside a tool call": {"messages": [ASK, REPLY | {"tool_calls": [CALL]}, RESULT, LAST], "tools": TOOLS},
    "two tool calls at once": {
        "messages": [
            ASK, {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER]}, RESULT,
            RESULT | {"tool_call_id": "call00002"}, REPLY,
        ],
        "tools": TOOLS,
    },
}  # fmt: skip


class Case(TypedDict):
    """What becomes of one kind of conversation."""

    name: str
    documents: int
    trained: list[str]
    "Texts that are trained, in order; empty where the conversation is refused."
    note: str
    "What the template does to it, or why it is refused."


class CorpusCheck(TypedDict):
    """What becomes of the conversations of a corpus."""

    records: int
    taken: int
    documents: int
    tokens: int
    refused: dict[str, int]


class TemplateCheck(TypedDict):
    """What a template does."""

    marks: bool
    header: str
    end: str
    closes_with_eos: bool
    prints_date: bool
    content_parts: bool
    cases: list[Case]
    example: list[str]
    "The documents of several answers, targets in double brackets."
    corpus: CorpusCheck | None


def check_template(tokenizer: str, options: RecordOptions, sources: tuple[str, ...] = ()) -> TemplateCheck:
    """Try a chat template.

    Args:
        tokenizer: Directory or hub name.
        options: How its records become documents; kind chat.
        sources: SOURCE arguments of a corpus to try too.

    Raises:
        PackError: There is no template, or nothing to read.
    """
    encoder = Encoder(tokenizer)
    maker = DocumentMaker(encoder, options)
    template = maker.conversations(with_tools=False).template
    cases, example = [], list[str]()
    for name, record in CASES.items():
        try:
            conversation = chat_conversation({options.messages_field: record["messages"], **record}, options)
            made = maker.conversations(bool(conversation.tools)).render(conversation)
        except SourceError as error:
            cases.append(Case(name=name, documents=0, trained=[], note=f"refused: {str(error).partition(';')[0]}"))
            continue
        trained = [one.text[start:stop] for one in made for start, stop, _ in one.targets or ()]
        cases.append(Case(name=name, documents=len(made), trained=trained, note=_note(name, made)))
        if name == "several answers":
            example = [_bracketed(one) for one in made]
    return {
        "marks": template.has_markers,
        "header": template.trial.header,
        "end": template.trial.end,
        "closes_with_eos": bool(template.closing_eos),
        "prints_date": "strftime_now" in template.text,
        "content_parts": template.wants_parts,
        "cases": cases,
        "example": example,
        "corpus": _corpus(sources, encoder, options) if sources else None,
    }


def _note(name: str, made: list[Rendering]) -> str:
    """Say what a template did that its trained text does not show."""
    text = made[-1].text
    notes = ["rewrites earlier turns: unrolled"] if len(made) > 1 else []
    if name in ("system prompt", "developer role"):
        start, stop = text.find("system prompt"), text.find("first question")
        own = any(start <= control.start < stop for control in made[-1].controls)
        notes.append("a turn of its own" if own else "merged into the question")
    if name.startswith("white space"):
        kept = [way for way, piece in (("before", "  first answer"), ("after", "first answer\n")) if piece in text]
        notes.append(f"kept {' and '.join(kept)}" if kept else "trimmed")
    if name == "reasoning in several answers" and "some thoughts" not in text:
        notes.append("earlier reasoning is gone")
    return "; ".join(notes)


def _bracketed(rendering: Rendering) -> str:
    text = rendering.text
    for start, stop, _ in reversed(rendering.targets or ()):
        text = f"{text[:start]}⟦{text[start:stop]}⟧{text[stop:]}"
    return text


def _corpus(specs: tuple[str, ...], encoder: Encoder, options: RecordOptions) -> CorpusCheck:
    sources = resolve_sources(specs, options)
    found: CorpusCheck = {"records": 0, "taken": 0, "documents": 0, "tokens": 0, "refused": {}}
    refused: Counter[str] = Counter()
    for chunk in read_chunks(sources, draw_places(sources, CHUNK_BYTES, 0), encoder, lambda: False):
        for documents in chunk.documents:
            found["taken"] += len(set(documents.doc_ids.tolist()))
            found["documents"] += len(documents.doc_ids)
            found["tokens"] += len(documents.input_ids)
        found["records"] += chunk.empty + len(chunk.rejected)
        # alike but for places, quotations and numbers: one line with its count
        refused.update(re.sub(r"'[^']*'|\d+", "…", entry.reason.split(";")[0]) for entry in chunk.rejected)
    found["records"] += found["taken"]
    found["refused"] = dict(refused.most_common())
    return found
