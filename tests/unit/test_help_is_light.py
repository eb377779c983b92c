"""A command line that answers at once: help imports nothing heavy, whatever the command."""

import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "datasets", "numba", "pyarrow", "plotly"]
SCRIPT = """
import sys
from pipeline.cli import main
try:
    main(sys.argv[1:], prog_name="pack")
except SystemExit as stop:
    assert stop.code == 0, stop.code
print(*sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)
"""


def commands() -> list[str]:
    import click

    from pipeline.cli import main

    return main.list_commands(click.Context(main))


@pytest.mark.parametrize("command", ["", *commands()])
def test_help_imports_nothing_heavy(command):
    arguments = [*([command] if command else []), "--help"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(heavy=HEAVY), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: pack {command}".rstrip())
    assert done.stderr.split() == []
