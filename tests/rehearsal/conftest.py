"""The CUDA path on a machine without a GPU: a fake device, and the operators' signatures in place of kernels."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASE = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
Rehearse = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="session")
def fake_device() -> Path:
    """Build the fake device against the installed torch, once for each version of it."""
    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build, which the fake device cannot stand in for")
    library = Path(tempfile.gettempdir()) / f"shardpack-fake-cuda-{torch.__version__}-{os.getuid()}.so"
    source = HERE / "fake_cuda.cpp"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        home = Path(torch.__file__).parent
        made = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *includes, str(source), "-o", str(made), *libraries]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("no g++ on this machine: the fake CUDA device cannot be built")
        assert done.returncode == 0, done.stderr
        made.replace(library)
    return library


@pytest.fixture
def packs_on_disk(write_dataset: Callable[..., Path]) -> Path:
    """Six packs of up to 48 tokens, from two sources."""
    sources = {"main": [[20, 11, 17], [40, 8], [48]], "more": [[30, 2, 9, 7], [25, 23], [48]]}
    return write_dataset(sources, seq_len=48, vocab_size=97)


@pytest.fixture
def small_model(tmp_path: Path) -> Callable[..., str]:
    """Write the configuration of a tiny model; a Llama where no fields say otherwise."""

    def write(name: str = "model", **fields: Any) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(BASE | {"model_type": "llama"} | fields))
        return str(path)

    return write


@pytest.fixture
def rehearse(fake_device: Path, tmp_path: Path, packs_on_disk: Path, small_model: Callable[..., str]) -> Rehearse:
    """Take steps for several jobs in one process; `{name: job}` to `{name: result}`.

    A job names a `backend`, a `model` (fields of its configuration), and `config` fields of the run; `sabotage` breaks
    the step on purpose.
    """

    def run(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        asked = {}
        for name, job in jobs.items():
            settings = {"steps": 8, "dtype": "bf16", "by_source": False, **job.get("config", {})}
            model = small_model(name, **job.get("model", {}))
            paths = {"dataset": str(packs_on_disk), "model": model, "out": str(tmp_path / f"run-{name}")}
            asked[name] = job | {"config": settings | paths}
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE / "stubs"), os.environ.get("PYTHONPATH", "")]),
            "LD_PRELOAD": str(fake_device),
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "rehearse.py")], input=json.dumps(asked), capture_output=True, text=True,
            env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
