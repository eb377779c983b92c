"""Text of strangers on a terminal: names, records and templates must not steer what shows them."""

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # marks that reorder what follows
_SEPARATORS = (0x2028, 0x2029)  # lines to some programs, nothing to others
_LINE = (
    {code: chr(0x2400 + code) for code in range(0x20)}  # the pictures of C0 controls: ESC is ␛
    | {0x7F: "␡"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}  # C1: some terminals read 0x9b as ESC [
    | {code: f"\\u{code:04x}" for code in (*_BIDI, *_SEPARATORS, *range(0xD800, 0xE000))}
    | {code: f"\\x{code - 0xDC00:02x}" for code in range(0xDC80, 0xDD00)}  # bytes of names that are not UTF-8
)
_LINES = {code: picture for code, picture in _LINE.items() if chr(code) not in "\n\t"}


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return text that a terminal can show and will not obey.

    Controls (C0, C1, DEL), marks of writing direction, line separators and unpaired surrogates become visible.

    Args:
        text: Anything, such as the name of a file or a record of a corpus.
        lines: Whether line feeds and tabs stay as they are; otherwise the result is one line.

    Example:
        ESC [ 2 J becomes ␛[2J, and a file called "a\xff" in Latin-1, "a\udcff" to Python, is written a\xff.
    """
    return text.translate(_LINES if lines else _LINE)
