"""Where control tokens stand in a text, as a tokenizer's own added-token matcher would find them.

Leftmost, longest first, with the three flags of `tokenizers`: lstrip and rstrip swallow white space, single_word asks
for a word boundary. One regular expression in the shape of a trie finds them: Gemma has 6,000 added tokens, and a plain
alternation of so many tries each of them at every character.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Control(NamedTuple):
    """A control token in a text."""

    start: int
    stop: int
    id: int


class AddedTokens:
    """The control tokens of a tokenizer.

    Args:
        ids: Text -> id.
        flags: Text -> names of flags that are set, for tokens that have any of lstrip, rstrip and single_word.
    """

    def __init__(self, ids: Mapping[str, int], flags: Mapping[str, Iterable[str]] | None = None) -> None:
        self.ids = dict(ids)
        self.flags = {text: frozenset(names) for text, names in (flags or {}).items()}
        self.pattern = re.compile(_trie_pattern(self.ids) if self.ids else r"(?!)")

    def find(self, text: str, start: int = 0, stop: int | None = None) -> list[Control]:
        """Return the control tokens inside `text[start:stop]`, in order."""
        found: list[Control] = []
        for match in self.pattern.finditer(text, start, len(text) if stop is None else stop):
            flags = self.flags.get(match[0], frozenset())
            first, last = match.span()
            if "single_word" in flags and (text[first - 1 : first].isalnum() or text[last : last + 1].isalnum()):
                continue
            if "lstrip" in flags:
                first = max(len(text[:first].rstrip()), found[-1].stop if found else 0)
            if "rstrip" in flags:
                last = len(text) - len(text[last:].lstrip())
            found.append(Control(first, last, self.ids[match[0]]))
        return found


def _trie_pattern(words: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of the words."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branch(root)


def _branch(node: dict[str, Any]) -> str:
    tails = []
    for character, below in node.items():
        if character:
            tail = re.escape(character)
            while len(below) == 1 and "" not in below:  # a chain needs no group, and no recursion
                character, below = next(iter(below.items()))
                tail += re.escape(character)
            tails.append(tail + ("" if below.keys() == {""} else _branch(below)))
    return f"(?:{'|'.join(tails)})" + ("?" if "" in node else "")
