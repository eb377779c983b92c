"""One conversation -> one document, or several where the template rewrites history.

A template that shows reasoning in the last answer only writes another text at every turn, and a model meets each of
them at inference. No single text holds them all, so the conversation is unrolled: each answer that is trained gets the
text that the template shows at that moment, and is the only target in it. Consecutive answers whose texts extend one
another stay one document, so only templates that really rewrite pay: n answers cost about n / 2 times the tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.config import RecordOptions
from pipeline.documents.chat import DocumentRenderer, Rendering, Renderings, RewrittenError
from pipeline.documents.layouts import Layout
from pipeline.documents.messages import Conversation, Message
from pipeline.documents.token_weights import with_token_weights
from pipeline.documents.weights import message_weights, token_weights

if TYPE_CHECKING:
    from pipeline.documents.template import ChatTemplate  # plain text needs no Jinja

MAX_LAYOUTS = 2048  # of one source; a layout is about as large as its conversation
TREATED = ("think>", "<tool_", "tool_response>")  # templates look for these in contents, and write other text then

Key = tuple[tuple[str, ...], tuple[float, ...]]


class ConversationRenderer:
    """Renders the conversations of one source with one template.

    Args:
        template: The chat template.
        options: How to train on them.
    """

    def __init__(self, template: "ChatTemplate", options: RecordOptions) -> None:
        self.template, self.options = template, options
        self.layouts: dict[Key, list[Layout]] = {}

    def render(self, conversation: Conversation) -> list[Rendering]:
        """Return the documents of a conversation, in the order of its turns.

        Args:
            conversation: At least one message.

        Raises:
            SourceError: The template refuses it, leaves a trained part out, or rewrites turns that may not be unrolled.
        """
        messages = self.template.shape(conversation)
        weights = message_weights(conversation, self.options)
        single = token_weights(conversation, self.options) if self.options.weighted else {}
        key = None if single else self._key(conversation, messages, weights)
        if key in self.layouts:
            filled = self._fill(self.layouts[key], messages)
            if filled is not None:
                return filled
        renderings = Renderings(self.template, conversation, messages)
        documents = self._documents(renderings, weights)
        made = [with_token_weights(one, single) if single else one.rendering for one in documents]
        if len(made) > 1:
            lasts = [len(document.messages) - 1 for document in documents]
            made = [replace(one, turn=last) for one, last in zip(made, lasts, strict=True)]
        if key is not None and len(self.layouts) < MAX_LAYOUTS:
            layouts = [
                Layout.of(rendering, document.content, len(document.messages), self.template.added)
                for rendering, document in zip(made, documents, strict=True)
            ]
            known = [layout for layout in layouts if layout is not None]
            if len(known) == len(layouts):
                self.layouts[key] = known
        return made

    def _key(self, conversation: Conversation, messages: list[Message], weights: Sequence[float]) -> Key | None:
        """Return what conversations of one layout share, or None for one that has more than plain contents."""
        if conversation.tools or self.template.trust:
            return None
        for message in messages:
            content = message["content"]
            if len(message) != 2 or not isinstance(content, str) or not content or content.isspace():
                return None
            if any(mark in content for mark in TREATED):  # ten times as fast as a pattern of the three
                return None
        return tuple(message["role"] for message in messages), tuple(weights)

    def _fill(self, layouts: list[Layout], messages: list[Message]) -> list[Rendering] | None:
        contents = [message["content"] for message in messages]
        filled = []
        for layout in layouts:
            text = self.template.render(messages[: layout.count])
            rendering = layout.fill(text, contents[: layout.count])
            if rendering is None:
                return None
            filled.append(rendering)
        return filled

    def _documents(self, renderings: Renderings, weights: Sequence[float]) -> list[DocumentRenderer]:
        count, unroll = len(renderings.messages), self.options.unroll
        trained = [index for index, weight in enumerate(weights) if weight]
        if unroll != "always" or not trained:
            try:
                whole = DocumentRenderer(renderings, count, weights, self.options)
                assert whole.rendering
            except RewrittenError:
                if unroll == "never" or self.options.train_on == "all":
                    raise
            else:
                return [whole]
        documents = []
        for answers in self._groups(renderings, trained) if unroll == "auto" else [[index] for index in trained]:
            documents += self._group(renderings, answers, weights)
        return documents

    def _groups(self, renderings: Renderings, trained: list[int]) -> list[list[int]]:
        """Return the trained messages, those together whose texts extend one another.

        Where the texts up to answers 1 and 3 begin alike but that up to 5 reads otherwise, [[1, 3], [5]].
        """
        groups: list[list[int]] = []
        for index in trained:
            text = renderings.text(index + 1)
            if groups and renderings.begins(groups[-1][-1] + 1, text) is not None:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _group(self, renderings: Renderings, answers: list[int], weights: Sequence[float]) -> list[DocumentRenderer]:
        last = answers[-1]
        document = DocumentRenderer(
            renderings, last + 1, [weights[i] if i in answers else 0.0 for i in range(last + 1)], self.options
        )
        try:
            assert document.rendering
        except RewrittenError:  # the texts extend one another, the prompts of a generation between them do not
            if len(answers) == 1:
                raise
            return [one for index in answers for one in self._group(renderings, [index], weights)]
        return [document]
