"""Which characters of a rendered conversation the messages wrote, and which the template.

A template is a program, so nothing is assumed about it. The conversation is rendered a second time with marks
(private-use characters) around every text in it. When removing the marks gives the first rendering again, the marks
say what came from where: added tokens outside of them are the template's own, everything inside is the user's text. A
template that rewrites contents (`strip`, JSON quoting, moving the system prompt) passes; one that looks at contents in
a way the marks disturb is tried again with fewer marks, and refused where control text makes the difference dangerous.
White space at the ends of a text is inside its marks wherever the template keeps it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from pipeline.documents.added_tokens import AddedTokens, Control
from pipeline.documents.messages import Message
from shards.errors import SourceError

Render = Callable[[list[Message], list[Any] | None], str]

PARTS = ("content", "reasoning_content", "tool_calls")
FIRST_MARK, LAST_MARK = 0xF0000, 0xFFFFD
BREAK = "\U0010fffd"
MARKS = re.compile(f"([{chr(FIRST_MARK)}-{chr(LAST_MARK)}{BREAK}])")
Place = tuple[int, int]  # message, part
Edge = Literal["inside", "newlines outside", "outside"]
INSIDE, NEWLINES_OUTSIDE, OUTSIDE = get_args(Edge)
THINK = re.compile(r"(\s*<think>)(.*?)(</think>)(.*)", re.DOTALL)


class ContentSpan(NamedTuple):
    """Characters of the rendering that a message wrote."""

    start: int
    stop: int
    message: int
    "Index of the message; one past the last for the tool schemas."
    part: int
    "Index into PARTS."


@dataclass(frozen=True)
class ContentSpans:
    """Where the characters of a rendering came from."""

    controls: list[Control]
    "Control tokens that the template wrote, in order."
    spans: list[ContentSpan] | None
    "What messages wrote, in order; None where it could not be told (then no message holds control text)."
    marked_calls: bool = True
    "Whether `spans` show tool calls and tool schemas."

    def start_of(self, message: int, start: int = 0) -> int | None:
        """Return where the text of a message begins, at or after `start`."""
        starts = (span.start for span in self.spans or () if span.message == message)
        return min((position for position in starts if position >= start), default=None)


def find_content_spans(
    render: Render,
    messages: list[Message],
    tools: list[Any] | None,
    text: str,
    added: AddedTokens,
    *,
    trust: bool = False,
) -> ContentSpans:
    """Find which characters of `text`, the rendering of `messages`, came from the messages.

    Args:
        render: Renders messages and tools; deterministic.
        messages: As they were rendered.
        tools: As they were rendered.
        text: The rendering.
        added: The control tokens of the tokenizer.
        trust: Control text in messages means control tokens.

    Raises:
        SourceError: It cannot be told, and a message holds control text.
    """
    find = added.pattern.search
    calls: list[Any] = [message["tool_calls"] for message in messages if "tool_calls" in message]
    risky = next((match[0] for leaf in _leaves([calls, tools]) if (match := find(leaf))), None)
    thinks = any(think_block(message) for message in messages)
    found = None
    for mark_calls in (True, False) if (calls or tools) and risky is None else (True,):
        for split_think in (False, True) if thinks else (False,):
            if found is None:
                marking = _Marking(render, messages, tools, text, added, mark_calls, split_think)
                found = marking.find()
    if trust:
        return replace(found or ContentSpans([], None, False), controls=added.find(text))
    for message in messages:
        for name in ("role", "name", "tool_call_id"):
            if isinstance(value := message.get(name), str) and find(value):
                raise SourceError(f"{name} {value!r} holds a control token; expected a plain name. Fix the record.")
    if found is not None:
        return found
    contents = (_plain(message.get(name)) for message in messages for name in PARTS[:2])
    risky = risky or next((match[0] for content in contents if (match := find(content))), None)
    if risky is not None:
        raise SourceError(
            f"the chat template changes contents that hold control text ({risky!r}), so its own marks cannot be "
            "told from the user's. Use another --chat-template, or --parse-special for a trusted corpus."
        )
    return ContentSpans(added.find(text), None)


@dataclass
class _Marking:
    """One way to put marks into a conversation."""

    render: Render
    messages: list[Message]
    tools: list[Any] | None
    text: str
    added: AddedTokens
    mark_calls: bool
    split_think: bool

    def find(self) -> ContentSpans | None:
        """Return the spans with as much white space in them as the template keeps, or None.

        Nearly all texts have none at their ends, or a template that keeps it: one rendering tells. Else it is left
        outside of all marks, where `strip` would find it, and each text that has some is tried alone.
        """
        edged = [place for place, value in self._texts() if value != value.strip()]
        found = self._attempt(dict.fromkeys(edged, INSIDE))
        if found is not None or not edged:
            return found
        edges = dict.fromkeys(edged, OUTSIDE)
        found = self._attempt(edges)
        for place in edged if found is not None else ():
            for edge in (INSIDE, NEWLINES_OUTSIDE):
                better = self._attempt(edges | {place: edge})
                if better is not None:
                    found, edges[place] = better, edge
                    break
        return found

    def _texts(self) -> Iterable[tuple[Place, str]]:
        for index, message in enumerate(self.messages):
            for part in range(2):  # content and reasoning; JSON quotes the white space of arguments
                if value := _plain(message.get(PARTS[part])):
                    yield (index, part), value

    def _attempt(self, edges: dict[Place, Edge]) -> ContentSpans | None:
        marked = self._render_marked(edges)
        return None if marked is None else _read_marks(marked, self.text, self.added, self.mark_calls)

    def _render_marked(self, edges: dict[Place, Edge]) -> str | None:
        messages, added, tools = self.messages, self.added, self.tools
        if FIRST_MARK + 2 * len(PARTS) * (len(messages) + 1) > LAST_MARK:
            return None
        marked: list[Message] = []
        for index, message in enumerate(messages):
            new = dict(message)
            for part, name in enumerate(PARTS):
                value = message.get(name)
                if not value or (name == "tool_calls" and not self.mark_calls):
                    continue
                code, edge = FIRST_MARK + 2 * (index * len(PARTS) + part), edges.get((index, part), OUTSIDE)
                if name == "tool_calls":
                    new[name] = [call | {"function": _mark(call["function"], code, added)} for call in value]
                elif self.split_think and part == 0 and (think := think_block(message)):
                    text = think[1] + _mark(think[2], code, added) + think[3] + _mark(think[4], code, added, edge)
                    new[name] = text if isinstance(value, str) else [{"type": "text", "text": text}]
                else:
                    new[name] = _mark(value, code, added, edge)
                if part == 1 and "thinking" in message:
                    new["thinking"] = new[name]
            marked.append(new)
        if tools and self.mark_calls:
            tools = _mark(tools, FIRST_MARK + 2 * (len(messages) * len(PARTS) + PARTS.index("tool_calls")), added)
        try:
            return self.render(marked, tools)
        except SourceError:  # the template looks at contents, and does not know the marks
            return None


def _mark(value: Any, code: int, added: AddedTokens, edge: Edge = OUTSIDE) -> Any:
    """Put marks around every text in a value; `edge` says on which side of them white space at its ends stands."""
    if isinstance(value, str):
        kept = {INSIDE: value, NEWLINES_OUTSIDE: value.strip("\n"), OUTSIDE: value.strip()}[edge]
        if not kept:
            return value
        at = value.index(kept)
        broken = added.pattern.sub(lambda match: match[0][:1] + BREAK + match[0][1:], kept)
        return f"{value[:at]}{chr(code)}{broken}{chr(code + 1)}{value[at + len(kept) :]}"
    if isinstance(value, list):
        return [_mark(item, code, added, edge) for item in value]
    if isinstance(value, dict):
        find = added.pattern.search
        return {
            _mark(name, code, added) if find(name) else name: (
                item if name == "type" and isinstance(item, str) and not find(item) else _mark(item, code, added, edge)
            )
            for name, item in value.items()
        }
    return value


def _read_marks(marked: str, text: str, added: AddedTokens, marked_calls: bool) -> ContentSpans | None:
    """Return the spans if the marked rendering without its marks is `text`, and marks come in pairs.

    With `(` and `)` for the marks of message 0's content, `<user>(Hi)<end>` splits into `<user>`, `(`, "Hi", `)`,
    `<end>`: every second part is a mark. Control tokens are looked for in the first and last, the span is [6, 8).
    """
    parts = MARKS.split(marked)
    if "".join(parts[::2]) != text:
        return None
    controls: list[Control] = []
    spans: list[ContentSpan] = []
    position, opened, begin = 0, -1, 0
    for index, part in enumerate(parts):
        if index % 2 == 0:
            if opened < 0 and part:
                controls += added.find(text, position, position + len(part))
            position += len(part)
        elif part != BREAK:
            code = ord(part) - FIRST_MARK
            if code % 2 == 0 and opened < 0:
                opened, begin = code, position
            elif code == opened + 1:
                spans.append(ContentSpan(begin, position, *divmod(code // 2, len(PARTS))))
                opened = -1
            else:
                return None
    return ContentSpans(controls, spans, marked_calls) if opened < 0 else None


def think_block(message: Message) -> re.Match[str] | None:
    """Match an answer that begins with its reasoning in tags."""
    return THINK.match(_plain(message["content"])) if message["role"] == "assistant" else None


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _leaves(value: Any) -> Iterable[str]:
    """Yield every text in a nested value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _leaves(item)
