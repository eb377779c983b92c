"""The Ray engine on a real cluster of two CPUs: the same bytes as here, dead workers survived, faults named."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import BuildConfig, build
from shards import PackError, verify

HERE = Path(__file__).parent
STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{HERE.parent.parent}:{HERE}"}},
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.fixture
def options(tmp_path: Path, tokenizer_dir: str) -> dict[str, Any]:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": f"{k}: " + "packing rows " * (k % 9 + 1)}) + "\n" for k in range(150)))
    return {"sources": (str(path),), "tokenizer": tokenizer_dir, "seq_len": 128, "window_bytes": 2000}


def arrow_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.arrow"))}


def test_ray_gives_the_same_bytes_and_survives_a_killed_worker(cluster, options, tmp_path, monkeypatch):
    local = build(BuildConfig(out=str(tmp_path / "local"), **options)).manifest
    (tmp_path / "poison.json").write_text(json.dumps({"window": 2, "times": 1}))
    monkeypatch.syspath_prepend(HERE)
    import poison

    monkeypatch.setattr("pipeline.building.engines._ray_task", poison.run_poisoned_ray_task)
    remote = build(BuildConfig(out=str(tmp_path / "ray"), engine="ray", workers=2, **options)).manifest
    assert json.loads((tmp_path / "poison.json").read_text())["times"] == 0
    assert local["shards"]["rows"] > 4
    assert remote["dataset_id"] == local["dataset_id"]
    assert remote["facts"]["engine"] == "ray"
    assert arrow_files(tmp_path / "ray") == arrow_files(tmp_path / "local")
    assert verify(tmp_path / "ray").ok


def test_a_window_that_kills_every_ray_worker_is_named(cluster, options, tmp_path, monkeypatch):
    (tmp_path / "poison.json").write_text(json.dumps({"window": 2, "times": 100}))
    monkeypatch.syspath_prepend(HERE)
    import poison

    monkeypatch.setattr("pipeline.building.engines._ray_task", poison.run_poisoned_ray_task)
    with pytest.raises(PackError, match=r"window 2 .*: its Ray worker died 3 times"):
        build(BuildConfig(out=str(tmp_path / "ray"), engine="ray", workers=2, **options))
    assert json.loads((tmp_path / "poison.json").read_text())["times"] == 97
    monkeypatch.undo()
    build(BuildConfig(out=str(tmp_path / "ray"), resume=True, **options))
    assert verify(tmp_path / "ray").ok


def test_a_bad_record_on_ray_is_the_same_error_as_here(cluster, options, tmp_path):
    with open(options["sources"][0], "a") as file:
        file.write("{}\n")
    messages = set()
    for engine in ("local", "ray"):
        with pytest.raises(PackError, match=r"c\.jsonl, line 151: no field 'text'") as caught:
            build(BuildConfig(out=str(tmp_path / engine), engine=engine, workers=2, **options))
        messages.add(str(caught.value))
    assert len(messages) == 1
