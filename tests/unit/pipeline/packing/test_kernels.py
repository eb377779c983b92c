"""Kernels give the same as plain Python and as machine code, and what is compiled is kept where it can be."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pipeline.packing import kernels
from pipeline.packing.cutting import cut
from pipeline.packing.kernels import KERNELS, Kernel
from pipeline.packing.packers import PACKERS
from pipeline.packing.rows import assemble_rows, count_targets
from pipeline.tokens import Documents
from shards.schema import Layout

LOOPS = """
from pipeline.packing.kernels import inner, kernel

@inner
def square(n):
    return n * n

@kernel(lambda n: n)
def sum_of_squares(n):
    total = 0
    for i in range(n):
        total += square(i)
    return total
"""


@pytest.fixture(params=[True, False], ids=["interpreted", "compiled"])
def both_ways(request, monkeypatch):
    """Force one way; the tests compare what comes out with what is right by definition."""
    monkeypatch.setattr(Kernel, "_runs_interpreted", lambda *_: request.param)


def instances():
    rng = np.random.default_rng(5)
    for seq_len in (7, 64, 500):
        for low, high in ((1, seq_len), (max(1, seq_len // 4), max(2, seq_len // 2))):
            yield rng.integers(low, high, 300, endpoint=True).astype(np.int32), seq_len


def test_every_packer_gives_the_same_bins_either_way(monkeypatch):
    compared = 0
    for lengths, seq_len in instances():
        for name, packer in PACKERS.items():
            for limit in (None, 3):
                found = []
                for interpreted in (True, False):
                    monkeypatch.setattr(Kernel, "_runs_interpreted", lambda *_, way=interpreted: way)
                    found.append(packer(lengths, seq_len, seed=11, max_segments=limit))
                for one, other in zip(*found, strict=True):
                    assert np.array_equal(one, other), (name, seq_len, limit)
                compared += 1
    assert compared == 6 * 2 * len(PACKERS)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("masked", [True, False])
def test_rows_hold_what_their_definition_says(masked):
    rng = np.random.default_rng(6)
    lengths = rng.integers(1, 40, 50)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = rng.integers(0, 2, offsets[-1]).astype(np.uint8) if masked else None
    documents = Documents(rng.integers(0, 99, offsets[-1]).astype(np.int32), offsets, np.arange(50), mask)
    segments = cut(lengths, 16, "split")
    bins = PACKERS["auto"](segments.length, 16)
    rows = assemble_rows(documents, segments, bins, Layout(seq_len=16, max_token_id=99))
    ids, positions, targets = [], [], []
    for segment in bins.order.tolist():
        start = offsets[segments.document[segment]] + segments.start[segment]
        stop = start + segments.length[segment]
        ids += documents.input_ids[start:stop].tolist()
        positions += range(stop - start)
        targets += [0, *documents.mask_of(start + 1, stop).tolist()]
    assert rows.input_ids.tolist() == ids
    assert rows.position_ids.tolist() == positions
    assert rows.loss_mask.tolist() == targets
    assert rows.num_targets.sum() == sum(targets)
    counted = count_targets(np.empty(0, np.uint8) if mask is None else mask, offsets[:-1], lengths)
    masks = [documents.mask_of(a + 1, b) for a, b in pairwise(offsets)]
    assert counted.tolist() == [int(part.sum()) for part in masks]


def test_a_process_compiles_when_it_has_done_enough_steps(monkeypatch):
    monkeypatch.setattr(kernels, "_state", {"steps": 0, "budget": 100})
    ran = []
    entry = Kernel(lambda n: ran.append(n), lambda n: n)
    KERNELS.remove(entry)
    monkeypatch.setattr(Kernel, "compiled", staticmethod(lambda n: ran.append(-n)))
    for n in (60, 30, 20, 1):
        entry(n)
    assert ran == [60, 30, -20, 1]


def run(code: str, tmp_path: Path, **environment: str) -> list[str]:
    loops = tmp_path / "loops.py"
    if not loops.exists():
        loops.write_text(LOOPS)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    variables |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(kernels.__file__).parents[2]}", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_compiled_code_is_known_to_the_next_process_until_its_source_changes(tmp_path):
    code = "from loops import *; k = sum_of_squares; print(k.is_kept(), k.compiled(4), k.is_kept())"
    assert run(code, tmp_path) == ["False 14 True"]
    assert run(code, tmp_path) == ["True 14 True"]
    with (tmp_path / "loops.py").open("a") as file:
        file.write("# changed\n")
    assert run(code, tmp_path) == ["False 14 True"]


PLACE = """
from loops import sum_of_squares
from pipeline.packing import kernels
kernels.KERNELS[:] = [sum_of_squares]
print(sum_of_squares.compiled(4))
print(sum_of_squares.compiled.stats.cache_path)
print(kernels.cache_note())
"""


def read_only(tmp_path: Path) -> dict[str, str]:
    """Return an environment where neither the module's folder nor the home directory can hold a cache, root or not."""
    (tmp_path / "__pycache__").touch()
    (tmp_path / "tmp").mkdir()
    return {"HOME": "/dev/null", "TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}


def test_where_home_and_package_are_read_only_machine_code_is_kept_in_a_private_temporary_directory(tmp_path):
    environment = read_only(tmp_path)
    root = tmp_path / "tmp" / f"cache-shardpack-{os.getuid()}"
    for _ in range(2):
        result, place, note = run(PLACE, tmp_path, **environment)
        assert result == "14"
        assert place.startswith(f"{root}/numba/")
        assert note == f"package and home directory are read-only: numba keeps what it compiles in {root}/numba"
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_temporary_directory_that_others_can_write_is_not_trusted(tmp_path):
    environment = read_only(tmp_path)
    root = tmp_path / "tmp" / f"cache-shardpack-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    assert run(PLACE, tmp_path, **environment) == [
        "14",
        "None",
        "numba has no place to keep what it compiles (package, home and temporary directory are read-only)",
    ]
    assert list(root.iterdir()) == []
