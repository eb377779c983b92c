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
        self._reaching = {self.ids[text]: names - {"special"} for text, names in self.flags.items() if text in self.ids}
        self.pattern = re.compile(_trie_pattern(self.ids) if self.ids else r"(?!)")

    def flags_of(self, token: int) -> frozenset[str]:
        """Return the flags by which a control token reaches for what stands beside it."""
        return self._reaching.get(token, frozenset())

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


class SpelledControls:
    """Counts texts that spell control tokens, which they do not become.

    Args:
        texts: What control tokens look like.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.num_texts = 0
        self.example = ""
        heads: dict[str, list[str]] = {}
        for text in texts:
            heads.setdefault(text[0], []).append(text)
        # One pattern a first character: it then begins with a literal, which `re` looks for at the speed of memory.
        self._patterns = {head: re.compile(_trie_pattern(spelled)) for head, spelled in heads.items()}

    def look_at(self, texts: Iterable[str]) -> None:
        """Count those of the texts that spell a control token."""
        for text in texts:
            for head, pattern in self._patterns.items():
                found = pattern.search(text) if head in text else None
                if found is not None:
                    self.num_texts += 1
                    self.example = self.example or found[0]
                    break

    def take(self) -> dict[str, Any]:
        """Return what was counted since the last call: `texts`, and one `example`; empty where there is none."""
        counted = {"texts": self.num_texts, "example": self.example} if self.num_texts else {}
        self.num_texts, self.example = 0, ""
        return counted


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
