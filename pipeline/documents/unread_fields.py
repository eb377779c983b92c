"""Fields of records and messages that no option reads and that look as if they changed what a record means.

Nothing is trained silently without them: a build counts them, says so once for each source, and refuses them where it
was told to (`--strict-fields`). Fields such as an id or a date are nobody's business and are passed over.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shards.errors import SourceError

MEANING = re.compile(
    r"(system|system_?prompt|instructions?|inputs?|contexts?|documents?|history|tools?|functions?|images?|audios?|videos?"
    r"|chat_template_kwargs|reject(ed)?|chosen)$|.*(mask|loss|weight|train|supervis|ignore)",
    re.IGNORECASE,
)
MESSAGE_FIELDS = frozenset(
    ("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content",
     "reasoning", "thinking", "train", "trainable", "loss", "weight")
)  # fmt: skip


class UnreadFields:
    """Counts fields that nobody reads.

    Args:
        strict: Refuse a record that has one.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.counts: dict[str, int] = {}

    def note(self, record: Mapping[str, Any], read: Iterable[str], messages: Iterable[Any] = ()) -> None:
        """Count the fields of one record, each once; those of its messages as `message.NAME`.

        Args:
            record: As it was read; a field without a value is no field.
            read: The names of the fields that were used.
            messages: Its messages, as they were read.

        Raises:
            SourceError: There is one, and none may be.
        """
        found = _meaningful(record, frozenset(read))
        for message in messages:
            if isinstance(message, dict) and not message.keys() <= MESSAGE_FIELDS:
                found += [f"message.{name}" for name in _meaningful(message, MESSAGE_FIELDS)]
        if found and self.strict:
            raise SourceError(
                f"holds {', '.join(map(repr, dict.fromkeys(found)))}, which no option reads; expected no such field "
                "with --strict-fields. Remove it, or name it with an option."
            )
        for name in dict.fromkeys(found):
            self.counts[name] = self.counts.get(name, 0) + 1

    def take(self) -> dict[str, int]:
        """Return how many records have each field, and begin anew."""
        counts, self.counts = self.counts, {}
        return counts


def _meaningful(fields: Mapping[str, Any], read: frozenset[str]) -> list[str]:
    return [
        name
        for name, value in fields.items()
        if name not in read and value not in (None, "", [], {}) and isinstance(name, str) and MEANING.match(name)
    ]
