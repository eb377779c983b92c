"""One document of a conversation -> its text, the control tokens that the template wrote, and what is trained of it.

Where a template carries `{% generation %}` marks, they say what is trained. Where it has none, the conversation is
rendered step by step: what the template writes up to the header of an answer, and up to its end, must each be the
beginning of the whole text. A template that rewrites earlier turns fails this; a mask is never guessed. Inside an
answer, an empty block that the template added by itself (such as `<think></think>`) is no target.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pipeline.config import RecordOptions
from pipeline.documents.added_tokens import Control
from pipeline.documents.content_spans import PARTS, ContentSpans, find_content_spans, think_block
from pipeline.documents.messages import Conversation, Message
from shards.errors import SourceError

if TYPE_CHECKING:
    from pipeline.documents.template import ChatTemplate  # plain text needs no Jinja

EMPTY_BLOCK = re.compile(r"<([^<>/\s]+)>\s*</\1>\s*|\[([^\[\]/\s]+)\]\s*\[/\2\]\s*")


class Target(NamedTuple):
    """Characters that are trained, and how much they weigh."""

    start: int
    stop: int
    weight: float = 1.0


class TokenWeights(NamedTuple):
    """What the tokens of some characters weigh, one by one."""

    spans: list[tuple[int, int]]
    "Characters of the rendering whose tokens have the weights."
    start: int
    "From here on, what is trained around them weighs like them."
    stop: int
    "Where that ends."
    weights: tuple[float, ...]
    "0, or from 2^-14 to 65,504."
    where: str
    "Whose they are, for messages."


@dataclass(frozen=True)
class Rendering:
    """A document as text; all positions are characters."""

    text: str
    controls: list[Control]
    "Control tokens, in order."
    targets: list[Target] | None
    "What is trained, rising and apart; None for everything."
    turn_ends: list[int]
    "Where turns end, rising, the last at the end of the text; only the last where nobody asked."
    end_weight: float
    "Weight of `eos_id`; 0 where it is not trained."
    prefix: tuple[int, ...] = ()
    "Ids put before the text."
    eos_id: int | None = None
    "Id put after the text."
    token_weights: tuple[TokenWeights, ...] = ()
    "Characters whose tokens have weights of their own."
    turn: int = 0
    "Where a conversation became several documents: the place of this one's last message in it, from 0."


class RewrittenError(SourceError):
    """The template rewrites earlier turns, so no mask can be placed in the whole."""


@dataclass
class Renderings:
    """What a template makes of the first messages of one conversation; each is rendered once."""

    template: "ChatTemplate"
    conversation: Conversation
    messages: list[Message]
    "The messages in the forms that the template wants."
    texts: dict[int, str] = field(default_factory=dict)
    prompts: dict[int, str] = field(default_factory=dict)

    def text(self, count: int) -> str:
        """Return the rendering of the first `count` messages."""
        if count not in self.texts:
            messages = self.messages[:count]
            self.texts[count] = self.template.render(messages, self.conversation.tools) if count else ""
        return self.texts[count]

    def prompt(self, count: int) -> str:
        """Return the rendering of the first `count` messages with the header of an answer to come."""
        if count not in self.prompts:
            self.prompts[count] = self.template.render(self.messages[:count], self.conversation.tools, prompt=True)
        return self.prompts[count]

    def begins(self, count: int, text: str) -> str | None:
        """Return the rendering of the first `count` messages if `text` goes on from it, without an EOS at its end."""
        alone = self.text(count)
        if text.startswith(alone):
            return alone
        short = alone.removesuffix(self.template.closing_eos)
        return short if short != alone and text.startswith(short) else None


class DocumentRenderer:
    """Renders the first messages of a conversation and finds what is trained of them.

    Args:
        renderings: Of the conversation.
        count: Messages of it that make this document.
        weights: How much each of these messages weighs; 0 for one that is not trained.
        options: How to train on it.

    Raises:
        SourceError: The template refuses the messages.
    """

    def __init__(self, renderings: Renderings, count: int, weights: Sequence[float], options: RecordOptions) -> None:
        self.renderings, self.template, self.options = renderings, renderings.template, options
        self.messages = renderings.messages[:count]
        self.weights = list(weights)
        self.blocks: list[tuple[int, int]] = []
        if self.template.has_markers:
            self.text, self.blocks = self.template.render_blocks(self.messages, renderings.conversation.tools)
            renderings.texts[count] = self.text
        else:
            self.text = renderings.text(count)

    @cached_property
    def rendering(self) -> Rendering:
        """The document with its targets.

        Raises:
            RewrittenError: The template rewrites earlier turns.
            SourceError: It leaves a trained part out, or no mask can be placed for another reason.
        """
        turn_ends = self._turn_ends() if self.options.overlong_policy == "truncate-turns" else []
        targets = self._targets()
        return Rendering(self.text, self.content.controls, targets, [*turn_ends, len(self.text)], self.weights[-1])

    @cached_property
    def content(self) -> ContentSpans:
        """What the messages wrote."""
        template, tools = self.template, self.renderings.conversation.tools
        found = find_content_spans(
            template.render, self.messages, tools, self.text, template.added, trust=template.trust
        )
        if found.spans is not None:
            self._check_complete(found)
        return found

    def _targets(self) -> list[Target] | None:
        everything = self.options.train_on == "all"
        if everything and all(weight == 1 for weight in self.weights):
            return None
        if everything:
            odd = [index for index, weight in enumerate(self.weights) if weight != 1]
            own = [self._own_range(index) for index in odd]
            rest = _without([Target(0, len(self.text))], own)
            weighed = [Target(*span, self.weights[index]) for index, span in zip(odd, own, strict=True)]
            return sorted(rest + [target for target in weighed if target.weight and target.start < target.stop])
        if self.template.has_markers and not self._trains_others():
            targets = self._marked_targets()
        else:
            targets = [Target(*self._own_range(index), weight) for index, weight in enumerate(self.weights) if weight]
        if self.options.train_template_tokens:
            return targets
        return _without(targets, [block for start, stop, _ in targets for block in self._empty_blocks(start, stop)])

    def _check_complete(self, found: ContentSpans) -> None:
        """Refuse a rendering that leaves out what it should hold; only reasoning of turns not trained may go."""
        seen = {(span.message, span.part) for span in found.spans or ()}
        conversation = self.renderings.conversation
        for index, message in enumerate(conversation.messages[: len(self.messages)]):
            untrained = not self.weights[index] or self.options.train_on == "all"
            history = message["role"] == "assistant" and untrained
            excused = {"content": history and think_block(message) is not None, "reasoning_content": history}
            excused["tool_calls"] = not found.marked_calls
            for part, name in enumerate(PARTS):
                value = message.get(name)
                blank = not (value.strip() if isinstance(value, str) else value)
                if not blank and not excused[name] and (index, part) not in seen:
                    raise _left_out(f"{name} of message {index} ({message['role']})")
        if conversation.tools and found.marked_calls and not any(m == len(self.messages) for m, _ in seen):
            raise _left_out("the tools")

    def _trains_others(self) -> bool:
        return any(w and m["role"] != "assistant" for w, m in zip(self.weights, self.messages, strict=True))

    def _marked_targets(self) -> list[Target]:
        """Return the ranges that the template marks, of trained messages only."""
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        spans = self.content.spans or []
        targets = []
        for number, (start, stop) in enumerate(self.blocks):
            inside = {span.message for span in spans if start <= span.start and span.stop <= stop}
            touched = {span.message for span in spans if span.start < stop and start < span.stop}
            if not touched and len(self.blocks) == len(answers):  # an answer without text of its own
                inside = {answers[number]} - {span.message for span in spans}
            if len(inside) != 1 or touched - inside or not inside <= set(answers):
                raise SourceError(
                    "a {% generation %} block of the chat template does not hold one assistant message; expected one "
                    "block for each (blocks in a macro, a filter or a set come out misplaced). Correct the template."
                )
            if weight := self.weights[inside.pop()]:
                targets.append(Target(start, self._without_tail(start, stop), weight))
        return targets

    def _own_range(self, index: int) -> tuple[int, int]:
        """Return where a message begins, after its header, and where it ends, its end-of-turn mark included."""
        stop = len(self._prefix(index + 1))
        answers = self.messages[index]["role"] == "assistant"
        start = self._answer_start(index) if answers else self.content.start_of(index)
        if start is None:  # no text of its own, so nothing to train on
            return (stop, stop)
        if start > stop:
            raise self._rewritten(self._prefix(index + 1))
        return (start, self._without_tail(start, stop))

    def _answer_start(self, index: int) -> int | None:
        """Return where the template's header of an answer ends.

        With `<user>Hi<bot>` for the prompt of a generation and `<user>Hi<bot>Yo` as the whole it is 13. Where the
        prompt goes on (`<user>Hi<bot><think>`) and the whole does not, it is 13 too: the end of what both share.
        """
        if index == 0:  # templates cannot render a conversation without messages
            header, first = self.template.trial.header, self.content.start_of(0)
            at = self.text.find(header, 0, len(self._prefix(1)) if first is None else first)
            return at + len(header) if header and at >= 0 else first
        prompt = ""
        if self.template.trial.has_prompt:
            prompt = self.renderings.prompt(index)
            if self.text.startswith(prompt):
                return len(prompt)
        base = len(self._prefix(index))
        common = _common(prompt or self._prefix(index) + self.template.trial.header, self.text)
        if common < base:
            raise self._rewritten(prompt)
        # What differs after it, the template writes into the prompt of a generation only, such as an open <think>.
        first = self.content.start_of(index, base)
        return common if first is None else min(common, first)

    def _prefix(self, count: int) -> str:
        """Return the rendering of the first messages, proven to be the beginning of the whole."""
        if count == len(self.messages):
            return self.text
        found = self.renderings.begins(count, self.text)
        if found is None:
            raise self._rewritten(self.renderings.text(count))
        return found

    def _rewritten(self, alone: str) -> RewrittenError:
        at = max(_common(alone, self.text) - 10, 0)
        here, there = self.text[at : at + 50], alone[at : at + 50]
        unroll = "Use --unroll auto. " if self.options.unroll == "never" else ""
        other = "" if self.options.train_on == "last-assistant" else "--train-on last-assistant, or "
        return RewrittenError(
            f"the chat template rewrites earlier turns: {here!r} reads {there!r} while the conversation is shorter; "
            f"expected the same text, without which no mask can be placed. {unroll}"
            f"Give a --chat-template with {{% generation %}} blocks, or use {other}--train-on all."
        )

    def _without_tail(self, start: int, stop: int) -> int:
        """Return the end of a turn without the white space after its end-of-turn mark, which no model generates."""
        last = start + len(self.text[start:stop].rstrip())
        for control in reversed(self.content.controls):
            if start <= control.start and last <= control.stop <= stop:
                return control.stop
        return stop

    def _empty_blocks(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the empty blocks that the template wrote before the first text of an answer, or around its begin.

        Of `<bot><think></think>Yo</s>` with the answer's own text at "Yo", `<think></think>` is one; in
        `<bot>Yo <b></b></s>` the block stands after the first text, so a person or model wrote it.
        """
        spans = self.content.spans
        before = max((span.stop for span in spans or () if span.stop <= start), default=0)
        found = [match.span() for match in EMPTY_BLOCK.finditer(self.text, before, stop) if match.end() > start]
        if spans is None and found:
            raise SourceError(
                f"an answer holds {self.text[slice(*found[0])]!r}, and it cannot be told whether the template wrote "
                "it. Use --train-template-tokens to train on it, or another --chat-template."
            )
        first = min((span.start for span in spans or () if start <= span.start < stop), default=stop)
        return [(begin, min(end, first)) for begin, end in found if begin < first]

    def _turn_ends(self) -> list[int]:
        """Return where turns but the last end, as far as the template shows it.

        What is cut off on the left must leave a conversation: there a turn is a user's message and all up to the next.
        """
        left, ends = self.options.truncate_side == "left", []
        for count in range(1, len(self.messages)):
            if left and self.messages[count]["role"] != "user":
                continue
            try:
                ends.append(len(self._prefix(count)))
            except SourceError:  # no boundary here, so the turn stays with the next one
                continue
        return sorted(set(ends) - {0, len(self.text)})


def _left_out(what: str) -> SourceError:
    return SourceError(
        f"the chat template leaves out {what}; expected all of it. "
        "Give a --chat-template that renders it, or remove the field."
    )


def _common(one: str, other: str) -> int:
    """Return how many characters two texts share at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # a bisection: slices compare a thousand times faster than a loop over characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _without(targets: list[Target], holes: list[tuple[int, int]]) -> list[Target]:
    """Return targets less holes; all rising, no target overlaps another."""
    for begin, end in holes:
        cut: list[Target] = []
        for start, stop, weight in targets:
            cut += [Target(start, min(stop, begin), weight), Target(max(start, end), stop, weight)]
        targets = [target for target in cut if target.start < target.stop]
    return targets
