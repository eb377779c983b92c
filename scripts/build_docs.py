"""Write the generated parts of docs/: cli.md from `--help`, the module map of architecture.md from the docstrings.

With --check, nothing is written and the exit code is 1 when a part is stale.
"""

import ast
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click

from pipeline.cli import main

ROOT = Path(__file__).parents[1]
PACKAGES = ("shards", "pipeline", "trainer")
HEAD = "# Command line\n\nGenerated from `--help` by `make docs`; do not edit.\n"
WIDTH = 100
BEGIN = "<!-- modules: written by `make docs` from the first line of each module -->\n"
END = "<!-- end of modules -->\n"


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield (full name, help text) of a command and of everything below it, in the order of its own help."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from commands(
                    below, below.context_class(below, info_name=name, parent=context, max_content_width=WIDTH)
                )


def command_page() -> str:
    """Return the whole of docs/cli.md."""
    settings = main.context_settings | {"terminal_width": WIDTH, "max_content_width": WIDTH}
    root = main.context_class(main, info_name="pack", **settings)
    parts = [f"\n## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in commands(main, root)]
    return HEAD + "".join(parts)


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, without its full stop."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0].rstrip(".")


def module_map() -> str:
    """Return one table a room: every module and its one line."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    parts = []
    for folder, group in groupby(sorted(files, key=lambda path: (path.parent, path.name)), lambda path: path.parent):
        modules = list(group)
        room = folder.relative_to(ROOT).as_posix()
        rows = [f"| `{room}/{path.name}` | {first_line(path)} |" for path in modules if path.name != "__init__.py"]
        about = first_line(folder / "__init__.py")
        parts.append(f"\n### `{room}/`\n\n{about}.\n\n| file | what it holds |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts) + "\n"


def architecture_page(page: str) -> str:
    """Return docs/architecture.md with its module map written anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + module_map() + END + rest.rpartition(END)[2]


if __name__ == "__main__":
    reference, architecture = ROOT / "docs" / "cli.md", ROOT / "docs" / "architecture.md"
    pages = {
        reference: command_page(),
        architecture: architecture_page(architecture.read_text(encoding="utf-8")),
    }
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if sys.argv[1:] == ["--check"]:
        if stale:
            sys.exit(f"{', '.join(f'docs/{path.name}' for path in stale)}: stale. Run: make docs")
    else:
        for path in stale:
            path.write_text(pages[path], encoding="utf-8")
