"""Tokenizer directories of tests: loaded by the library, or copied with changes."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


def load(directory: str) -> Tokenizer:
    return Tokenizer.from_file(f"{directory}/tokenizer.json")


JsonEntries = dict[str, Any] | None


def copy_with(directory: str, target: Path, *, tokenizer: JsonEntries = None, config: JsonEntries = None) -> str:
    """Copy a tokenizer directory, changing some entries of its JSON files."""
    shutil.copytree(directory, target)
    for name, changes in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        content = json.loads((target / name).read_text("utf-8"))
        content.update(changes or {})
        (target / name).write_text(json.dumps(content), "utf-8")
    return str(target)
