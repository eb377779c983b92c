"""One chat template: how it renders, and the forms in which it wants its messages.

Rendering is that of `transformers` (see `jinja.py`), so a conversation reads as it will at inference. Templates differ
in what they take: arguments of tool calls as an object or as JSON text, no content as null or as empty text, content as
text or as parts. A wrong form is often rendered without a word (a Python dict, JSON quoted twice, "None"), so each form
is tried once on a small conversation, and the first that comes out right is used for all records.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError

from pipeline.documents.added_tokens import AddedTokens
from pipeline.documents.jinja import CompiledTemplate
from pipeline.documents.messages import Conversation, Message
from shards.errors import PackError, SourceError

REFUSALS = (TemplateError, TypeError, ValueError, LookupError)
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Dialect:
    """The forms that a template wants; found by trying them on a small conversation."""

    empty: str | None = ""
    "Content of a message that only calls tools."
    objects: bool = True
    "Tool-call arguments as an object, not as JSON text."
    parts: bool = False
    "Content as a list of parts, not as text."


class Trial(NamedTuple):
    """What a template writes around an answer in the smallest conversation."""

    header: str
    "Before the answer; empty where it does not show."
    end: str
    "After the answer."
    has_prompt: bool
    "Whether it writes the header of an answer to come."


class ChatTemplate:
    """A chat template, compiled once per process.

    Args:
        text: The template.
        special_tokens: bos_token, eos_token, … as the template reads them.
        added: The control tokens of the tokenizer.
        trust: Control text in messages means control tokens.

    Raises:
        PackError: The template is no valid template.
    """

    def __init__(
        self, text: str, special_tokens: Mapping[str, str], added: AddedTokens, *, trust: bool = False
    ) -> None:
        self.text = text
        self.special_tokens = dict(special_tokens)
        self.added = added
        self.trust = trust
        self.has_markers = GENERATION.search(text) is not None
        self._dialect = Dialect()
        self._calls_known = False
        try:
            self._compiled = CompiledTemplate(text, self.special_tokens)
            hello = self._try("hello", [{"role": "user", "content": "hello"}])
        except TemplateSyntaxError as error:
            raise PackError(
                f"chat template, line {error.lineno}: {error.message}; expected a Jinja template. Correct it."
            ) from None
        if not hello and self._try("hello", [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]):
            self._dialect = Dialect(parts=True)

    def render(self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """Render a conversation.

        Args:
            messages: As `shape` gives them.
            tools: Tool schemas.
            prompt: End with the header of an answer to come.

        Raises:
            SourceError: The template refuses the messages.
        """
        try:
            return self._compiled.render(messages, tools, prompt)
        except REFUSALS as error:
            raise _refused(error) from None

    def render_blocks(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and return the character ranges of its `{% generation %}` blocks too, in order."""
        if not self.has_markers:
            return self.render(messages, tools), []
        try:
            text, ranges = self._compiled.render_blocks(messages, tools)
        except REFUSALS as error:
            raise _refused(error) from None
        return text, sorted((start, stop) for start, stop in ranges if stop > start)

    def shape(self, conversation: Conversation) -> list[Message]:
        """Return the messages in the forms that this template wants."""
        if not self._calls_known and any("tool_calls" in message for message in conversation.messages):
            self._learn_calls()
        return [self._shaped(message, self._dialect) for message in conversation.messages]

    @property
    def wants_parts(self) -> bool:
        """Whether it takes content as a list of parts, not as text."""
        return self._dialect.parts

    @cached_property
    def trial(self) -> Trial:
        """What the template writes around an answer, as far as the smallest conversation shows it."""
        trial: list[Message] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "trial answer"}]
        trial = [self._shaped(message, self._dialect) for message in trial]
        before, whole = self._try("hello", trial[:1]), self._try("trial answer", trial)
        if before is None or whole is None:
            return Trial("", "", "add_generation_prompt" in self.text)
        prompt = self.render(trial[:1], prompt=True)
        head, _, end = whole.partition("trial answer")
        for longer in (prompt, head):
            if longer != before and longer.startswith(before):
                return Trial(longer[len(before) :], end, prompt != before)
        return Trial("", end, prompt != before)

    @cached_property
    def closing_eos(self) -> str:
        """The EOS that this template puts after every rendering, however short; empty where it does not.

        After `<bot>Yo<end></s>` the EOS closes the rendering; in `<bot>Yo</s>` it is the end of the answer itself, and
        a template that writes another mark there once the conversation goes on rewrites the answer.
        """
        eos = self.special_tokens.get("eos_token", "")
        end = self.trial.end
        return eos if eos and end.endswith(eos) and end.removesuffix(eos).strip() else ""

    def _try(self, wanted: str, messages: list[Message]) -> str | None:
        """Return the rendering of a trial conversation if it holds what is wanted."""
        try:
            text = self.render(messages)
        except SourceError:
            return None
        return text if wanted in text else None

    def _learn_calls(self) -> None:
        """Find out how this template wants tool calls; the first form that shows name and arguments as JSON wins."""
        self._calls_known = True
        function = {"name": "trial_name", "arguments": {"trial_key": "trial value"}}
        call = {"type": "function", "id": "call00001", "function": function}
        wrong = ("'trial_key'", '\\"trial', "None")  # a Python dict, JSON quoted twice, a null as text
        trial: list[Message] = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        for empty in ("", None):
            for objects in (True, False):
                dialect = replace(self._dialect, empty=empty, objects=objects)
                text = self._try("trial_name", [self._shaped(message, dialect) for message in trial])
                if text and "trial_key" in text and not any(form in text for form in wrong):
                    self._dialect = dialect
                    return

    def _shaped(self, message: Message, dialect: Dialect) -> Message:
        content: Any = message["content"]
        if not content and "tool_calls" in message:
            content = dialect.empty
        elif dialect.parts:
            content = [{"type": "text", "text": content}]
        shaped = message | {"content": content}
        if "reasoning_content" in message:
            shaped["thinking"] = message["reasoning_content"]  # the name that harmony templates read
        if "tool_calls" in message and not dialect.objects:
            calls = [dict(call) for call in message["tool_calls"]]
            for call in calls:
                arguments = call["function"]["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                call["function"] = call["function"] | {"arguments": text}
            shaped["tool_calls"] = calls
        return shaped


def _refused(error: Exception) -> SourceError | TemplateError:
    """Return what to raise for an error of the template: a fault of the record, but for a template that is none."""
    if isinstance(error, TemplateSyntaxError):
        return error
    return SourceError(
        f"the chat template refuses it ({error}); expected roles and fields that the template knows. "
        "Fix the record or give another --chat-template."
    )
