"""The elements of a JSON array, or several JSON values one after another, as one line each.

The text is passed on, not what it parses to: the reader judges duplicate keys, wrong escapes, NaN and odd numbers as it
does in JSONL (a parser that gives values, such as ijson, refuses some of them and changes others).
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator

from pipeline.sources.files import MAX_RECORD_BYTES
from shards.errors import SourceError

CHUNK_CHARS = 1 << 20
_DELIMITER = re.compile(r'["\[\]{}]')
_STRING_REST = re.compile(r'(?:[^"\\]++|\\.)*+"', re.DOTALL)


def json_elements(name: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each element of a top-level array, or each of several objects, on one line.

    The text is passed on, not what it parses to: the reader sees duplicate keys, wrong escapes and odd numbers itself.
    """
    text = _Text(chunks)
    is_array = text.peek() == "["
    text.at += is_array
    number = 0
    while (mark := text.peek()) and not (is_array and mark == "]"):
        if mark == "," and number:
            text.at += 1
            continue
        value = text.value()
        if value is None:
            raise SourceError(f"{name}, record {number + 1}: broken or cut off; expected a JSON value. Fix the file.")
        yield value.replace("\n", " ").replace("\r", " ").encode("utf-8", "surrogateescape")  # no JSON inside strings
        number += 1
    text.at += is_array
    if is_array and (not mark or text.peek()):
        what = "text follows the end of the array" if mark else "the array does not end"
        raise SourceError(f"{name}: {what}; expected one JSON array. Fetch the file again.")


class _Text:
    """The text of a JSON file, held only around the value being read."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._more = filter(None, map(decoder.decode, chunks))
        self._scan = json.JSONDecoder().raw_decode
        self.buffer, self.at = "", 0

    def peek(self) -> str:
        """Skip white space and return the next character; nothing at the end."""
        while True:
            while self.at < len(self.buffer):
                if self.buffer[self.at] not in " \t\r\n":
                    return self.buffer[self.at]
                self.at += 1
            self.buffer, self.at = next(self._more, ""), 0
            if not self.buffer:
                return ""

    def value(self) -> str | None:
        """Return the text of the next value; None where it is cut off or broken."""
        grow, end = CHUNK_CHARS, self._end()
        while end is None or end == len(self.buffer):  # cut off, or a number that may go on
            more = ""
            while len(more) < grow and (chunk := next(self._more, "")):
                more += chunk
            if not more or len(self.buffer) - self.at > MAX_RECORD_BYTES:
                break
            self.buffer, self.at, grow = self.buffer[self.at :] + more, 0, grow * 2
            end = self._end()
        if end is None:
            return None
        start, self.at = self.at, end
        return self.buffer[start:end]

    def _end(self) -> int | None:
        try:
            end: int = self._scan(self.buffer, self.at)[1]
        except json.JSONDecodeError:
            return None
        except RecursionError:  # the reader rejects it; what follows is read
            return _closing(self.buffer, self.at)
        return end


def _closing(text: str, at: int) -> int | None:
    """Return where the object or list that begins at `at` ends; None where it does not.

    Only brackets outside of strings count: {"a]": [1]} closes at its last character.
    """
    depth = 0
    while mark := _DELIMITER.search(text, at):
        at = mark.end()
        if mark[0] == '"':
            end = _STRING_REST.match(text, at)
            if end is None:
                return None
            at = end.end()
        else:
            depth += 1 if mark[0] in "[{" else -1
            if depth == 0:
                return at
    return None
