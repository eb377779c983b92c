"""Which room may import what, read from the sources themselves."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shards", "pipeline", "trainer")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FLOORS = 6
MODULES_IN_A_FOLDER = 20

ANYWHERE = {
    "pipeline.caches",
    "pipeline.config",
    "pipeline.formatting",
    "pipeline.tokens",
}  # what every room of pipeline may import
BUILDS = {f"pipeline.{room}" for room in ("building", "documents", "estimate", "report", "sources")} | ANYWHERE
FACES = {"trainer.bench", "trainer.demo", "trainer.demo_corpus", "trainer.cli"}
LOOP = {f"trainer.{path.stem}" for path in (ROOT / "trainer").glob("*.py")} - FACES  # the top floor of trainer
TRAINING = LOOP | {
    "trainer",
    "trainer.feeding",
    "trainer.model",
    "trainer.saving",
}
EVERYTHING = {"*"}
COMMANDS = {"pipeline.cli", "pipeline.recipe", "pipeline.report"}  # what a room's commands may import besides

# room -> the rooms it may import, besides its own and shards; a room is a folder, or a file beside the folders
ROOMS: dict[str, set[str]] = {
    "shards": set(),
    "pipeline": EVERYTHING,  # the public names, imported lazily
    "pipeline.__main__": {"pipeline.cli"},
    "pipeline.cli": EVERYTHING,
    "pipeline.caches": set(),
    "pipeline.config": set(),
    "pipeline.recipe": {"pipeline.config"},
    "pipeline.formatting": set(),
    "pipeline.tokens": set(),
    "pipeline.packing": ANYWHERE,
    "pipeline.sources": ANYWHERE,
    "pipeline.documents": ANYWHERE | {"pipeline.sources"},
    "pipeline.report": ANYWHERE | {"pipeline.cli", "pipeline.packing"},
    "pipeline.building": ANYWHERE | {"pipeline.sources", "pipeline.documents", "pipeline.packing"},
    "pipeline.estimate": ANYWHERE | {f"pipeline.{room}" for room in ("sources", "documents", "packing", "report")},
    "pipeline.export": ANYWHERE | {f"pipeline.{room}" for room in ("building", "cli", "report", "sources")},
    "trainer.model": {"trainer.config", "trainer.batch", "pipeline.caches"},  # what kernels took is remembered
    "trainer.feeding": {"trainer.batch", "trainer.model", "pipeline.packing"},  # packs may be drawn anew each epoch
    "trainer.saving": {f"trainer.{room}" for room in ("checks", "config", "distributed", "metrics", "model")},
    "trainer.documents": TRAINING | ANYWHERE | {"pipeline.cli", "pipeline.report", "trainer.cli"},
    "trainer.bench": TRAINING | BUILDS | {"trainer.demo_corpus"},
    "trainer.demo": TRAINING | BUILDS | {"trainer.bench", "trainer.demo_corpus", "pipeline.cli"},
    "trainer": EVERYTHING,  # as pipeline
    "trainer.cli": EVERYTHING,
    "trainer.demo_corpus": set(),
}


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


def room_of(module: str) -> str:
    """Return the room of a module: `shards`, or a folder or a file at the top of `pipeline` or `trainer`."""
    package, *rest = module.split(".")
    if package == "shards" or not rest or rest == ["__init__"]:
        return package
    return f"{package}.{rest[0]}"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def rooms_imported(path: Path) -> set[str]:
    own = room_of(module_of(path))
    return {room_of(name) for name in imported(path) if name.partition(".")[0] in PACKAGES} - {own, "shards"}


def allowed(room: str, target: str) -> bool:
    may = ROOMS.get(room, TRAINING)
    return may == EVERYTHING or target in may


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_can_be_imported_where_there_is_no_posix(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in body if isinstance(node, ast.ImportFrom)}
    assert not names & {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def test_every_package_has_files_to_check():
    assert {name_of(path).partition("/")[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_its_room_may_see(path):
    room = room_of(module_of(path))
    assert room in ROOMS or room in LOOP, f"name the room {room} in the table above"
    more = COMMANDS if path.name == "cli.py" else set()
    assert {target for target in rooms_imported(path) - more if not allowed(room, target)} == set()
    assert path.parts[len(ROOT.parts)] == "trainer" or "torch" not in tops(path)
    assert path.name == "cli.py" or "click" not in tops(path)


def test_every_room_of_the_table_exists():
    rooms = {room_of(module_of(path)) for path in FILES}
    planned = {"pipeline.tokens", "pipeline.recipe"}
    assert set(ROOMS) - planned <= rooms


@pytest.mark.parametrize("path", [path for path in FILES if name_of(path).startswith("shards/")], ids=name_of)
def test_the_format_needs_numpy_pyarrow_and_xxhash_only(path):
    foreign = {name for name in tops(path) if name not in sys.stdlib_module_names}
    remote = {"fsspec", "huggingface_hub"} if path.name == "remote.py" else set()
    assert foreign <= {"shards", "numpy", "pyarrow", "xxhash"} | remote


def test_a_person_climbs_few_floors_inside_pipeline():
    below: dict[str, set[str]] = {}
    for path in FILES:
        room = room_of(module_of(path))
        if room.startswith("pipeline.") and path.name != "cli.py" and room != "pipeline.__main__":
            below.setdefault(room, set()).update(rooms_imported(path))

    def floor(room: str, seen: tuple[str, ...] = ()) -> int:
        assert room not in seen, f"a circle of imports: {' -> '.join([*seen, room])}"
        return 1 + max((floor(other, (*seen, room)) for other in below.get(room, ())), default=0)

    assert 2 <= max(floor(room) for room in below) <= FLOORS


@pytest.mark.parametrize("top", [*PACKAGES, "tests"])
def test_no_folder_is_a_heap(top):
    folders = {path.parent for path in (ROOT / top).rglob("*.py")}
    assert {name_of(f): n for f in folders if (n := len(list(f.glob("*.py")))) > MODULES_IN_A_FOLDER} == {}


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__init__.py"], ids=name_of)
def test_the_architecture_page_names_every_module_with_its_one_line(path):
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(f"| `{name_of(path)}` | ")]
    assert len(rows) == 1
    assert len(rows[0].split("|")[2].strip()) > 10


def test_the_reader_of_imports_sees_those_inside_functions(tmp_path):
    file = tmp_path / "example.py"
    file.write_text("import os.path\n\ndef f():\n    from torch.nn import Linear\n    import click\n")
    assert list(imported(file)) == ["os.path", "torch.nn", "click"]
