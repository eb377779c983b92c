"""Errors that the user can fix.

Every message reads `where: what, with the value; what was expected. What to do.` and fits on one line: the command line
prints it as it is and exits with code 1. Any other exception is a bug and keeps its traceback.
"""


class PackError(Exception):
    """Root of every error that the user can fix."""


class FormatError(PackError):
    """A dataset on disk breaks a rule of `docs/format.md`.

    Args:
        message: The one-line message.
        rule: The rule it breaks, such as "F4"; None where no single rule applies.
    """

    def __init__(self, message: str, rule: str | None = None) -> None:
        super().__init__(message)
        self.rule = rule


class OptionError(PackError):
    """An argument has a value that cannot be used, and names it: "`packs_per_step`: 0; expected at least 1".

    Args:
        name: The argument, such as "packs_per_step"; the command line writes its flag in its place.
        what: The value and what was expected, as full sentences.
    """

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name, what)

    def __str__(self) -> str:
        """Return the message."""
        name, what = self.args
        return f"`{name}`: {what}"


class SegmentTooLongError(PackError):
    """A segment is longer than the pack it must fit in, or is not a positive integer."""


class SourceError(PackError):
    """A corpus cannot be read: a missing file, a broken record, a wrong field."""


class TokenizerError(PackError):
    """A tokenizer cannot be loaded, or cannot do what the build needs."""


class ModelError(PackError):
    """A model cannot be trained on packed rows, or does not fit the dataset."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as messages say it: "1 shard", "2,000 packs", "3 micro-batches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def reason_of(error: BaseException) -> str:
    """Return the first line of what a library says, fit for the middle of a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(" .:") or type(error).__name__
