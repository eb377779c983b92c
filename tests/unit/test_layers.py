"""Which package may import what, read from the sources themselves."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shards", "pipeline", "trainer")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAY_SEE_PIPELINE = {"trainer/bench/run.py", "trainer/bench/view.py", "trainer/demo.py"}


def imported(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            yield ".".join([*package, *([node.module] if node.module else [])])


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_package_has_files_to_check():
    assert {name_of(path).partition("/")[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_its_layer_may_see(path):
    package = name_of(path).partition("/")[0]
    seen = tops(path)
    allowed = {"shards": {"shards"}, "pipeline": {"shards", "pipeline"}, "trainer": {"shards", "trainer"}}[package]
    if name_of(path) in MAY_SEE_PIPELINE:
        allowed = allowed | {"pipeline"}
    assert seen & set(PACKAGES) <= allowed
    assert package == "trainer" or "torch" not in seen
    assert path.name == "cli.py" or "click" not in seen


@pytest.mark.parametrize("path", [path for path in FILES if name_of(path).startswith("shards/")], ids=name_of)
def test_the_format_needs_numpy_pyarrow_and_xxhash_only(path):
    import sys

    foreign = {name for name in tops(path) if name not in sys.stdlib_module_names}
    assert foreign <= {"shards", "numpy", "pyarrow", "xxhash"}


def test_the_reader_of_imports_sees_those_inside_functions(tmp_path):
    file = tmp_path / "example.py"
    file.write_text("import os.path\n\ndef f():\n    from torch.nn import Linear\n    import click\n")
    assert list(imported(file)) == ["os.path", "torch.nn", "click"]
