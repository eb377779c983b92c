"""File names made of source names."""

import re
from collections.abc import Iterable


def file_stems(sources: Iterable[str]) -> dict[str, str]:
    """Return a file name without suffix for each source, all different.

    Example:
        "web", "a/b" and "a:b" give web, a_b and a_b-2.
    """
    stems: dict[str, str] = {}
    for source in sources:
        stem = plain = re.sub(r"[^\w.-]", "_", source).lstrip(".") or "documents"
        number = 1
        while stem in stems.values():
            number += 1
            stem = f"{plain}-{number}"
        stems[source] = stem
    return stems
