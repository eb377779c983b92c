"""What a user installs is whole: the built wheel holds every module and page, and nothing else."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(directory.glob("shardpack-*.whl"))


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    sources = [
        path.relative_to(ROOT).as_posix()
        for package in ("pipeline", "shards", "trainer")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sorted(names) == sorted(sources)
    assert {"pipeline/report/page.html", "pipeline/py.typed", "shards/py.typed", "trainer/py.typed"} <= set(names)


def test_the_wheel_offers_the_command_and_the_licence(wheel):
    files = zipfile.ZipFile(wheel)
    texts = {
        name.partition(".dist-info/")[2]: files.read(name).decode() for name in files.namelist() if ".dist-" in name
    }
    assert "pack = pipeline.cli:main" in texts["entry_points.txt"]
    assert "Apache License" in texts["licenses/LICENSE"]
    core = [
        line for line in texts["METADATA"].splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert not [line for line in core if line.startswith(("Requires-Dist: torch", "Requires-Dist: plotly"))]


def test_the_unpacked_wheel_answers(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = "import pipeline; from pipeline.cli import main; print(pipeline.__file__); main(['--help'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "inspect" in done.stdout
