"""Write docs/cli.md from what `pack COMMAND --help` prints; with --check, exit with 1 when the file is stale."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from pipeline.cli import main

PAGE = Path(__file__).with_name("cli.md")
HEAD = "# Command line\n\nGenerated from `--help` by `make docs`; do not edit.\n"
WIDTH = 100


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


def page() -> str:
    """Return the whole of docs/cli.md."""
    settings = main.context_settings | {"terminal_width": WIDTH, "max_content_width": WIDTH}
    root = main.context_class(main, info_name="pack", **settings)
    parts = [f"\n## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in commands(main, root)]
    return HEAD + "".join(parts)


if __name__ == "__main__":
    text = page()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit("docs/cli.md is stale. Run: make docs")
    else:
        PAGE.write_text(text, encoding="utf-8")
