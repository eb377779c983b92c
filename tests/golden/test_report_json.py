"""The figures of the golden dataset as `pack inspect --json` printed them when version 2 of the report was settled."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pipeline.cli import main

HERE = Path(__file__).parent


def rounded(value: Any) -> Any:
    """Forget what another processor may compute otherwise: digits of a float beyond the ninth."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_the_report_of_the_golden_dataset_stays_as_it_is():
    done = CliRunner().invoke(main, ["inspect", str(HERE / "v2"), "--packs-per-step", "2", "--json"])
    report = json.loads(done.stdout)
    assert report.pop("path") == str(HERE / "v2")
    report["warnings"] = len(report["warnings"])  # their words may get better
    expected = json.loads((HERE / "report_v2.json").read_text(encoding="utf-8"))
    assert rounded({name: report[name] for name in expected}) == expected  # fields may be added
