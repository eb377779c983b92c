"""One conversation -> its text, the control tokens that the template wrote, and the characters that are targets.

Where a template carries `{% generation %}` marks, they say what is trained. Where it has none, the conversation is
rendered step by step: what the template writes up to the header of an answer, and up to its end, must each be the
beginning of the whole text. A template that rewrites earlier turns fails this and is refused; a mask is never guessed.
Inside an answer, an empty block that the template added by itself (such as `<think></think>`) is no target.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from pipeline.config import RecordOptions
from pipeline.documents.added_tokens import Control
from pipeline.documents.content_spans import PARTS, ContentSpans, find_content_spans, think_block
from pipeline.documents.messages import Conversation, Message
from pipeline.documents.template import ChatTemplate
from shards.errors import SourceError

Range = tuple[int, int]

EMPTY_BLOCK = re.compile(r"<([^<>/\s]+)>\s*</\1>\s*|\[([^\[\]/\s]+)\]\s*\[/\2\]\s*")


@dataclass(frozen=True)
class Rendering:
    """A conversation as text; all positions are characters."""

    text: str
    controls: list[Control]
    "Control tokens, in order."
    targets: list[Range] | None
    "What is trained, rising and apart; None for everything."
    turn_ends: list[int]
    "Where turns end, rising, the last at the end of the text; only the last where nobody asked."
    trains_end: bool
    "Whether `eos_id` is a target."
    prefix: tuple[int, ...] = ()
    "Ids put before the text."
    eos_id: int | None = None
    "Id put after the text."


def trained_messages(conversation: Conversation, train_on: str) -> list[bool]:
    """Return for each message whether it is trained, by its role and its own `train` and `weight` fields."""
    roles = [message["role"] for message in conversation.messages]
    if train_on == "all":
        chosen = [True] * len(roles)
    elif train_on in ("auto", "completion"):
        first = conversation.completion_from
        chosen = [role == "assistant" and index >= first for index, role in enumerate(roles)]
    elif train_on == "last-assistant":
        last = max((index for index, role in enumerate(roles) if role == "assistant"), default=-1)
        chosen = [index == last for index in range(len(roles))]
    else:
        names = {name.strip() for name in train_on.split(",")}
        chosen = [role in names for role in roles]
    return [own if flag is None else flag for own, flag in zip(chosen, conversation.train, strict=True)]


def render_conversation(conversation: Conversation, template: ChatTemplate, options: RecordOptions) -> Rendering:
    """Render a conversation and find its targets.

    Args:
        conversation: At least one message.
        template: The chat template.
        options: How to train on it.

    Raises:
        SourceError: The template refuses the conversation, leaves a trained part out, or rewrites earlier turns.
    """
    return _ConversationRenderer(conversation, template, options).rendering()


@dataclass
class _ConversationRenderer:
    conversation: Conversation
    template: ChatTemplate
    options: RecordOptions

    def __post_init__(self) -> None:
        self.messages: list[Message] = self.template.shape(self.conversation)
        self.trained = trained_messages(self.conversation, self.options.train_on)
        self.text, self.blocks = self.template.render_blocks(self.messages, self.conversation.tools)
        self.ends: dict[int, str] = {len(self.messages): self.text}

    def rendering(self) -> Rendering:
        targets: list[Range] | None
        if all(self.trained) and self.options.train_on == "all":
            targets = None
        elif self.options.train_on == "all":
            held_out = [self._own_range(index) for index, trained in enumerate(self.trained) if not trained]
            targets = _without([(0, len(self.text))], held_out)
        elif self.template.has_markers and not self._trains_others():
            targets = self._marked_targets()
        else:
            targets = [self._own_range(index) for index, trained in enumerate(self.trained) if trained]
        if targets is not None and self.options.train_on != "all" and not self.options.train_template_tokens:
            targets = _without(targets, [block for target in targets for block in self._empty_blocks(*target)])
        turn_ends = self._turn_ends() if self.options.overlong_policy == "truncate-turns" else []
        return Rendering(self.text, self.content.controls, targets, [*turn_ends, len(self.text)], self.trained[-1])

    @cached_property
    def content(self) -> ContentSpans:
        template = self.template
        tools, trust = self.conversation.tools, template.trust
        found = find_content_spans(template.render, self.messages, tools, self.text, template.added, trust=trust)
        if found.spans is not None:
            self._check_complete(found)
        return found

    def _check_complete(self, found: ContentSpans) -> None:
        """Refuse a rendering that leaves out what it should hold; only reasoning of turns not trained may go."""
        seen = {(span.message, span.part) for span in found.spans or ()}
        for index, message in enumerate(self.conversation.messages):
            history = message["role"] == "assistant" and (not self.trained[index] or self.options.train_on == "all")
            excused = {"content": history and think_block(message) is not None, "reasoning_content": history}
            excused["tool_calls"] = not found.marked_calls
            for part, name in enumerate(PARTS):
                value = message.get(name)
                blank = not (value.strip() if isinstance(value, str) else value)
                if not blank and not excused[name] and (index, part) not in seen:
                    raise self._left_out(f"{name} of message {index} ({message['role']})")
        if self.conversation.tools and found.marked_calls and not any(m == len(self.messages) for m, _ in seen):
            raise self._left_out("the tools")

    def _left_out(self, what: str) -> SourceError:
        return SourceError(
            f"the chat template leaves out {what}; expected all of it. "
            "Give a --chat-template that renders it, or remove the field."
        )

    def _trains_others(self) -> bool:
        roles = [message["role"] for message in self.messages]
        return any(trained and role != "assistant" for trained, role in zip(self.trained, roles, strict=True))

    def _marked_targets(self) -> list[Range]:
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
            if self.trained[inside.pop()]:
                targets.append((start, self._without_tail(start, stop)))
        return targets

    def _own_range(self, index: int) -> Range:
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
            prompt = self.template.render(self.messages[:index], self.conversation.tools, prompt=True)
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
        if count not in self.ends:
            alone = self.template.render(self.messages[:count], self.conversation.tools) if count else ""
            eos = self.template.special_tokens.get("eos_token", "")
            if not self.text.startswith(alone):
                if not (eos and alone.endswith(eos) and self.text.startswith(alone.removesuffix(eos))):
                    raise self._rewritten(alone)
                alone = alone.removesuffix(eos)  # some templates close every rendering with EOS
            self.ends[count] = alone
        return self.ends[count]

    def _rewritten(self, alone: str) -> SourceError:
        at = max(_common(alone, self.text) - 10, 0)
        here, there = self.text[at : at + 50], alone[at : at + 50]
        other = "" if self.options.train_on == "last-assistant" else "--train-on last-assistant, or "
        return SourceError(
            f"the chat template rewrites earlier turns: {here!r} reads {there!r} while the conversation is shorter; "
            "expected the same text, without which no mask can be placed. "
            f"Give a --chat-template with {{% generation %}} blocks, or use {other}--train-on all."
        )

    def _without_tail(self, start: int, stop: int) -> int:
        """Return the end of a turn without the white space after its end-of-turn mark, which no model generates."""
        last = start + len(self.text[start:stop].rstrip())
        for control in reversed(self.content.controls):
            if start <= control.start and last <= control.stop <= stop:
                return control.stop
        return stop

    def _empty_blocks(self, start: int, stop: int) -> list[Range]:
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


def _common(one: str, other: str) -> int:
    """Return how many characters two texts share at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # a bisection: slices compare a thousand times faster than a loop over characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _without(ranges: list[Range], holes: list[Range]) -> list[Range]:
    """Return ranges less holes; all rising, no range overlaps another."""
    for begin, end in holes:
        cut: list[Range] = []
        for start, stop in ranges:
            cut += [(start, min(stop, begin)), (max(start, end), stop)]
        ranges = [(start, stop) for start, stop in cut if start < stop]
    return ranges
