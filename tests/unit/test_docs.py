"""The pages under docs/ agree with the code and with each other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("**/*.md")])


def test_the_command_reference_is_what_help_prints():
    done = subprocess.run(
        [sys.executable, "scripts/build_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    assert [t for t in targets if t and not (page.parent / t).exists()] == []


def test_there_are_pages_to_check():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "architecture.md", "cli.md", "format.md"} <= {
        page.name for page in PAGES
    }


def test_the_architecture_page_says_where_to_change_each_thing_once_and_names_files_that_exist():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Where do I change X\n")[2].partition("\n## ")[0]
    things = re.findall(r"^\| ([^|]+) \|", table, flags=re.MULTILINE)
    assert len(things) > 10
    assert sorted(set(things)) == sorted(things)
    paths = re.findall(r"`((?:pipeline|shards|trainer|docs|tests)/[\w/.]+)`", page)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert page.rstrip().endswith("<!-- end of modules -->")


def test_the_readme_leads_to_every_page_once():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| [docs/")]
    linked = [line.split("]")[0].removeprefix("| [") for line in rows]
    assert sorted(linked) == sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
