"""The benchmarks work before anyone waits hours for them: the GPU suite in its tiny form, the writer of results."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from shards import Dataset
from shards.ordering.block_order import BlockOrder
from trainer.model.backends.interface import Backend
from trainer.model.backends.registry import ATTENTION_BACKENDS

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a file of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def by_name(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return by_name


def suite(load, tmp_path, monkeypatch, *parts, module=None):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (module or load("gpu_suite")).main(
        ["--out", str(tmp_path / "out"), "--device", "cpu", *(["--parts", *parts] if parts else [])]
    )
    assert not list((tmp_path / "tmp").glob("gpu-suite-*"))
    assert (tmp_path / "out" / "gpu-suite.md").read_text().startswith("# GPU suite")
    return json.loads((tmp_path / "out" / "gpu-suite.json").read_text())


def test_the_gpu_suite_runs_in_its_tiny_form(load, tmp_path, monkeypatch):
    found = suite(load, tmp_path, monkeypatch, "equality", "kernels", "llama-1b")
    ran = [row for row in found["equality"] if "not_run" not in row]
    assert all(row["equal"] for row in ran)
    assert {row["backend"] for row in ran} == {"cpu"}
    reasons = {row["backend"]: row["not_run"] for row in found["equality"] if "not_run" in row}
    assert {"cpu", *reasons} == set(ATTENTION_BACKENDS)
    assert "CUDA devices only" in reasons["flash-attn-3"]
    page = (tmp_path / "out" / "gpu-suite.md").read_text()
    assert "| feeding | real tokens/s |" in page.partition("##")[0]
    assert [row["documents"] for row in found["kernels"]] == ["32", "128", "lognormal"]
    assert found["llama-1b"]["disagreements"] == {}
    assert not [row for row in found["llama-1b"]["rows"] if "failed" in row]


@pytest.mark.slow
def test_the_whole_gpu_suite_runs_in_its_tiny_form(tmp_path):
    command = [sys.executable, FOLDER / "gpu_suite.py", "--out", tmp_path, "--device", "cpu"]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads((tmp_path / "gpu-suite.json").read_text())
    assert all(said.endswith(" s") for said in found["parts"].values())
    assert found["distilgpt2"]["disagreements"] == {}
    assert [(row["compiled"], row["batches"]) for row in found["loop"]] == [
        (compiled, batches) for compiled in (False, True) for batches in ("on the device", "from the loader")
    ]


def test_a_part_without_time_left_says_so(load, tmp_path):
    load("gpu_suite").main(["--out", str(tmp_path), "--device", "cpu", "--minutes", "-1"])
    parts = json.loads((tmp_path / "gpu-suite.json").read_text())["parts"]
    assert set(parts.values()) == {"no time left"}


def test_every_row_is_on_disk_before_the_next_is_measured(load, tmp_path, monkeypatch):
    gpu_suite, seen = load("gpu_suite"), []

    def part(suite):
        suite.figures["rows"] = []
        for number in range(3):
            seen.append(
                json.loads(file.read_text()).get("rows") if (file := tmp_path / "gpu-suite.json").exists() else None
            )
            suite.add("rows", {"number": number})
        yield "Rows", ["number"], []

    monkeypatch.setattr(gpu_suite, "PARTS", {"rows": part})
    gpu_suite.main(["--out", str(tmp_path), "--dry-run"])
    assert seen == [None, [{"number": 0}], [{"number": 0}, {"number": 1}]]


def test_a_part_that_used_its_time_keeps_its_rows_and_is_run_again(load, tmp_path, monkeypatch):
    gpu_suite, ran = load("gpu_suite"), []

    def part(suite):
        ran.append(suite.deadline)
        suite.deadline = -1.0 if len(ran) == 1 else suite.deadline
        rows = [["first"]] if suite.is_over() else [["first"], ["second"]]
        yield "Part", ["row"], rows

    monkeypatch.setattr(gpu_suite, "PARTS", {"part": part})
    gpu_suite.main(["--out", str(tmp_path), "--dry-run"])
    page = (tmp_path / "gpu-suite.md").read_text()
    assert "| first |" in page
    assert "ran out of time" in page
    gpu_suite.main(["--out", str(tmp_path), "--dry-run"])
    assert "| second |" in (tmp_path / "gpu-suite.md").read_text()
    assert len(ran) == 2


def test_a_second_call_runs_only_the_parts_that_are_missing(load, tmp_path, monkeypatch):
    gpu_suite, ran = load("gpu_suite"), []

    def part(name):
        def run(suite):
            ran.append(name)
            if ran.count("second") == 1 and name == "second":
                raise RuntimeError("killed")
            yield f"Part {name}", ["a"], [[f"figure of {name}"]]

        return run

    monkeypatch.setattr(gpu_suite, "PARTS", {name: part(name) for name in ("first", "second")})
    with pytest.raises(SystemExit):
        gpu_suite.main(["--out", str(tmp_path), "--dry-run"])
    gpu_suite.main(["--out", str(tmp_path), "--dry-run"])
    assert ran == ["first", "second", "second"]
    page = (tmp_path / "gpu-suite.md").read_text()
    assert all(f"| figure of {name} |" in page for name in ("first", "second"))
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.setattr(gpu_suite, "describe_machine", lambda device: {"name": "another"})
    gpu_suite.main(["--out", str(tmp_path), "--dry-run"])
    assert ran[3:] == ["first", "second"]


def test_a_part_that_fails_leaves_the_others_their_turn(load, tmp_path, monkeypatch):
    gpu_suite = load("gpu_suite")

    def broken(suite):
        yield "Before it fails", ["a"], [["kept"]]
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu_suite, "PARTS", {"broken": broken, "equality": gpu_suite.equality})
    with pytest.raises(SystemExit) as stop:
        gpu_suite.main(["--out", str(tmp_path), "--device", "cpu"])
    assert stop.value.code == 1
    found = json.loads((tmp_path / "gpu-suite.json").read_text())
    assert found["parts"]["broken"] == "failed: RuntimeError: no kernel image"
    assert found["parts"]["equality"].endswith(" s")
    assert "| kept |" in (tmp_path / "gpu-suite.md").read_text()


def test_a_backend_that_fails_is_a_row(load, tmp_path, monkeypatch):
    gpu_suite = load("gpu_suite")

    def refuses(*arguments):
        raise RuntimeError("only head_dim 128\nand more")

    monkeypatch.setitem(ATTENTION_BACKENDS, "odd", Backend(refuses, lambda needs: None))
    found = suite(load, tmp_path, monkeypatch, "equality", "kernels", module=gpu_suite)
    ran = [row for row in found["equality"] if "not_run" not in row]
    assert {(row["backend"], row["equal"], row.get("failed")) for row in ran} == {
        ("odd", False, "RuntimeError: only head_dim 128"), ("cpu", True, None)
    }  # fmt: skip
    assert {row["backend"] for row in found["kernels"]} == {"cpu"}
    assert "odd, documents of 32: RuntimeError: only head_dim 128" in found["left_out"]


def test_results_name_machine_versions_commit_and_command(load, tmp_path, monkeypatch):
    write_up = load("write_up")
    made = write_up.WriteUp("Title", ["One sentence."], [("", ["a", "b"], [["x", write_up.middle([1.0, 250.0, 3.0])]])])
    monkeypatch.setattr(sys, "argv", ["bench_x.py", "--out", str(tmp_path), "--hardware", "box"])
    write_up.run("x", "", lambda arguments: made, ["numpy", "no-such-package"])
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("x-box-20")
    text = file.read_text()
    for part in ("`python benchmarks/bench_x.py --out", "* Commit: ", "* Machine: ", "numpy ", "| x | 3 (1–250) |"):
        assert part in text
    assert "no-such-package" not in text


def test_a_commit_is_marked_where_more_than_results_changed(load, tmp_path, monkeypatch):
    write_up = load("write_up")

    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *words], check=True)

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "x.md").write_text("old")
    (tmp_path / "code.py").write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(write_up, "RESULTS", results)
    clean = write_up.commit()
    assert len(clean) == 10
    (results / "x.md").write_text("new")
    assert write_up.commit() == clean
    (tmp_path / "code.py").write_text("new")
    assert write_up.commit() == f"{clean}-dirty"


def test_quick_prints_and_writes_nothing(load, tmp_path, monkeypatch, capsys):
    write_up = load("write_up")
    monkeypatch.setattr(sys, "argv", ["bench_x.py", "--quick", "--out", str(tmp_path)])
    write_up.run("x", "", lambda arguments: write_up.WriteUp(f"{arguments.repeats} run", []), [])
    assert "# 1 run" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_runner_knows_every_benchmark():
    names = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
    assert {"build", "loader", "packing", "train"} <= set(names)
    done = subprocess.run([sys.executable, FOLDER / "run.py", "speed"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"speed: no such benchmark; there are {', '.join(names)}" in done.stderr


def test_a_peer_without_an_environment_is_left_out_by_name(load, tmp_path, monkeypatch):
    peers = load("peers")
    monkeypatch.setattr(peers, "HOME", tmp_path)
    (tmp_path / "litdata" / "bin").mkdir(parents=True)
    (tmp_path / "litdata" / "bin" / "python").touch()
    assert peers.python_of("litdata") == tmp_path / "litdata" / "bin" / "python"
    (said,) = peers.missing(["litdata", "datatrove"])
    assert said == "datatrove is left out; `python benchmarks/peers.py datatrove` makes its environment."


def test_an_unknown_peer_is_one_line():
    command = [sys.executable, FOLDER / "peers.py", "seqio"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "seqio: no such peer; there are datatrove, litdata, megatron-core, mosaicml-streaming" in done.stderr


def test_peers_read_every_text_once(load, tmp_path):
    peers = load("peer_builds")
    texts = [f"text {i}" for i in range(7)]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shares = [peers.texts_of([str(file)], worker, 3) for worker in range(3)]
    assert sorted(text for share in shares for text in share) == texts


@pytest.mark.parametrize("value", ["</s>", {"content": "</s>", "lstrip": False}])
def test_peers_end_a_document_with_the_tokenizers_eos(load, tmp_path, value):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    assert load("peer_builds").end_of_text(str(tmp_path)) == "</s>"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["build", "chat", "loader", "packing", "train"])
def test_a_benchmark_runs_quickly_and_leaves_nothing(name, tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), "--quick", name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as child:
        text = child.communicate()[0]
    assert child.returncode == 0
    assert "NOT EQUAL" not in text
    assert text.count("|") > 20
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("bench-")]


def test_synthetic_metadata_opens_and_names_its_steps(load, tmp_path):
    path = load("synthetic_metadata").write_metadata(tmp_path / "big", 20_000, 1000)
    dataset = Dataset(path)
    assert (len(dataset.shards), len(dataset)) == (20_000, int(dataset.shards.columns["packs"].sum()))
    counts = [source["counts"] for source in dataset.manifest["sources"]]
    packs = BlockOrder(dataset.shards, dataset.index, counts, packs_per_step=1024).step_packs(3, 7)
    assert len(set(packs.tolist())) == 1024
    assert sum(file.stat().st_blocks * 512 for file in path.iterdir()) < 4 << 20, "20 million packs take no disk"


def test_the_speed_of_exports_is_measured_for_every_format_of_our_own(load, tmp_path):
    module = load("bench_export")
    arguments = argparse.Namespace(quick=True, repeats=1, tokens=0, scratch=tmp_path)
    ((_, columns, rows),) = module.measure(arguments).tables
    assert [row[0] for row in rows] == ["megatron", "megatron-bridge", "parquet"]
    assert {len(row) for row in rows} == {len(columns)}
    assert not list(tmp_path.iterdir())


def test_what_a_peer_must_read_follows_from_the_segments(load, tmp_path):
    """By hand: segments [5, 6, 7] and [8, 9] of which 6 and 9 are targets."""
    module = load("check_exports")
    row = {
        "cu_seqlens": np.array([0, 3, 5]), "input_ids": np.array([5, 6, 7, 8, 9]),
        "loss_mask": np.array([0, 1, 0, 0, 1]),
        "doc_ids": np.array([3, 4]), "doc_parts": np.array([0, 0]), "doc_offsets": np.array([0, 0]),
    }  # fmt: skip
    assert module.pack_of(row) == {
        "input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, -100, 9], "position_ids": [0, 1, 2, 0, 1],
        "seq_lengths": [3, 2], "doc_ids": [3, 4], "doc_parts": [0, 0], "doc_offsets": [0, 0],
    }  # fmt: skip
    assert module.batch_of(row) == {
        "tokens": [5, 6, 8], "labels": [6, 7, 9], "loss_mask": [1, 0, 1], "position_ids": [0, 1, 0],
        "cu_seqlens": [0, 2, 3],
    }  # fmt: skip
