"""Fields of records and messages that no option reads and that look as if they changed what a record means.

Nothing is trained silently without them: a build counts them, says so once for each source, and refuses them where it
was told to (`--strict-fields`). Fields such as an id or a date are nobody's business and are passed over.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.sources.parsing import changes_meaning
from shards.errors import SourceError

MAX_SHAPES = 1024  # sets of fields that are remembered
MESSAGE_FIELDS = frozenset(
    ("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content",
     "reasoning", "thinking", "train", "trainable", "loss", "weight")
)  # fmt: skip


def refusal(fields: Iterable[str]) -> str:
    """Say why a record with such fields is refused."""
    return (
        f"holds {', '.join(map(repr, dict.fromkeys(fields)))}, which no option reads; expected no such field "
        "with --strict-fields. Remove it, or name it with an option."
    )


class UnreadFields:
    """Counts fields that nobody reads.

    Args:
        strict: Refuse a record that has one.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.counts: dict[str, int] = {}
        self._suspects: dict[tuple[Any, ...], tuple[str, ...]] = {}

    def note(self, record: Mapping[str, Any], read: Iterable[str], messages: Iterable[Any] = ()) -> None:
        """Count the fields of one record, each once; those of its messages as `message.NAME`.

        Args:
            record: As it was read; a field without a value is no field.
            read: The names of the fields that were used.
            messages: Its messages, as they were read.

        Raises:
            SourceError: There is one, and none may be.
        """
        found = self._meaningful(record, frozenset(read))
        for message in messages:
            if isinstance(message, dict) and not message.keys() <= MESSAGE_FIELDS:
                found += [f"message.{name}" for name in self._meaningful(message, MESSAGE_FIELDS)]
        if found and self.strict:
            raise SourceError(refusal(found))
        for name in dict.fromkeys(found):
            self.counts[name] = self.counts.get(name, 0) + 1

    def count(self, name: str, number: int) -> None:
        """Count so many records that have a field."""
        if number:
            self.counts[name] = self.counts.get(name, 0) + number

    def take(self) -> dict[str, int]:
        """Return how many records have each field, and begin anew."""
        counts, self.counts = self.counts, {}
        return counts

    def _meaningful(self, fields: Mapping[str, Any], read: frozenset[str]) -> list[str]:
        """Return the fields that change what they stand in; records of the same fields are judged by name once."""
        key = (read, *fields)
        names = self._suspects.get(key)
        if names is None:
            names = tuple(n for n in fields if n not in read and isinstance(n, str) and changes_meaning(n))
            if len(self._suspects) < MAX_SHAPES:
                self._suspects[key] = names
        return [name for name in names if fields[name] not in (None, "", [], {})]
