"""Conversations with the same roles read alike, so what was worked out for one is filled in for the next.

Proving a mask takes several renderings: with marks around contents, and of each shorter conversation. Nearly all
templates write the same text around the contents of every conversation with the same roles. So the text around them,
and what was found in it, is kept as a layout. Another conversation of these roles is rendered once; where its text is
the layout with its own contents filled in, the layout's targets are its targets, else it is worked out by itself.

For "<user>Hi<bot>Yo<end>" the literals are "<user>", "<bot>", "<end>"; a target [13, 20) runs from the end of literal 1
to the end of literal 2, whatever the contents.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.documents.added_tokens import AddedTokens, Control
from pipeline.documents.chat import Rendering, Target
from pipeline.documents.content_spans import ContentSpans

Anchor = tuple[int, int]  # number of the literal, characters into it


@dataclass(frozen=True)
class Layout:
    """What the documents of some roles have in common."""

    literals: list[str]
    "Text before, between and after the contents; one more than messages."
    rendering: Rendering
    "Of the document it was taken from; texts and positions are replaced."
    controls: list[tuple[Anchor, Anchor, int]]
    targets: list[tuple[Anchor, Anchor, float]] | None
    turn_ends: list[Anchor]

    @property
    def count(self) -> int:
        """Messages of the document."""
        return len(self.literals) - 1

    @classmethod
    def of(cls, rendering: Rendering, content: ContentSpans, count: int, added: AddedTokens) -> "Layout | None":
        """Return the layout of a document, or None where contents and template are not as simple as that.

        Args:
            rendering: The document.
            content: What its messages wrote.
            count: Its messages.
            added: The control tokens; some reach for what stands beside them, which a layout does not know.
        """
        spans = content.spans or []
        if [(span.message, span.part) for span in spans] != [(index, 0) for index in range(count)]:
            return None
        if any(added.flags_of(control.id) for control in rendering.controls):
            return None
        begins = [0, *(span.stop for span in spans)]
        ends = [*(span.start for span in spans), len(rendering.text)]

        def anchor(position: int) -> Anchor:
            number = bisect_right(begins, position) - 1
            if position > ends[number]:
                raise _InsideContentError
            return number, position - begins[number]

        try:
            targets = rendering.targets
            return cls(
                [rendering.text[begin:end] for begin, end in zip(begins, ends, strict=True)],
                rendering,
                [(anchor(start), anchor(stop), token) for start, stop, token in rendering.controls],
                None if targets is None else [(anchor(start), anchor(stop), weight) for start, stop, weight in targets],
                [anchor(end) for end in rendering.turn_ends],
            )
        except _InsideContentError:
            return None

    def fill(self, text: str, contents: Sequence[str]) -> Rendering | None:
        """Return the document of other contents, or None where its text is not this layout with them filled in.

        Args:
            text: Its rendering.
            contents: Of its messages.
        """
        literals = self.literals
        if not text.startswith(literals[0]):
            return None
        begins, position = [0], len(literals[0])
        for content, literal in zip(contents, literals[1:], strict=True):
            # The same three ways to keep white space, in the same order, as where marks find them.
            for kept in (content, content.strip("\n"), content.strip()):
                end = position + len(kept)
                if text.startswith(literal, end) and text.startswith(kept, position):
                    break
            else:
                return None
            begins.append(end)
            position = end + len(literal)
        if position != len(text):
            return None
        return replace(
            self.rendering,
            text=text,
            controls=[Control(begins[a] + m, begins[b] + n, token) for (a, m), (b, n), token in self.controls],
            targets=None
            if self.targets is None
            else [Target(begins[a] + m, begins[b] + n, weight) for (a, m), (b, n), weight in self.targets],
            turn_ends=[begins[number] + offset for number, offset in self.turn_ends],
        )


class _InsideContentError(Exception):
    """A position that no literal holds."""
