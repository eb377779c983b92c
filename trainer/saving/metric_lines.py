"""The lines of a run's metrics.jsonl, read back."""

import json
import sys
from pathlib import Path


def last_step(path: Path) -> int:
    """Return the last step that a metrics.jsonl tells of, 0 where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return max((step for line in lines if (step := step_of(line)) != sys.maxsize), default=0)


def step_of(line: str) -> int:
    """Return the step of a line; the largest number for the half line of a killed run."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return sys.maxsize
