"""Training, reports and checks of a dataset that lies on S3: as from a directory, through a cache."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, RecordOptions, build
from pipeline.cli import main
from shards import Cache, Dataset
from shards.fetching import remote

URL = "s3://datasets/questions"


def pack(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*arguments])
    assert result.exit_code == code, result.output + str(result.exception)
    return result


@pytest.fixture(scope="module")
def directory(s3: Any, tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: str) -> str:
    """A dataset of some twenty shards, here and on S3."""
    root = tmp_path_factory.mktemp("here")
    lines = [
        json.dumps({"prompt": f"{k}: why?", "completion": " because " + "so it is, " * (1 + k % 9)}) for k in range(400)
    ]
    (root / "questions.jsonl").write_text("\n".join(lines) + "\n")
    build(
        BuildConfig(
            sources=(str(root / "questions.jsonl"),), out=str(root / "dataset"), tokenizer=tokenizer_dir,
            seq_len=128, window_bytes=2048, records=RecordOptions(kind="instruction"),
        )
    )  # fmt: skip
    s3.put(str(root / "dataset"), "datasets/questions", recursive=True)
    return str(root / "dataset")


@pytest.fixture
def gets(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts downloads of each object."""
    counts: Counter[str] = Counter()
    get_file = s3.get_file

    def counted(path: str, *rest: Any, **named: Any) -> Any:
        counts[Path(path).name] += 1
        return get_file(path, *rest, **named)

    monkeypatch.setattr(s3, "get_file", counted)
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    return counts


def shards_of(gets: Counter[str]) -> Counter[str]:
    return Counter({name: count for name, count in gets.items() if name[:8].isdigit()})


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


FLAGS = (
    "--epochs", "2", "--packs-per-step", "4", "--lr", "1e-2", "--dtype", "fp32", "--log-every", "1", "--device", "cpu",
    "--shuffle-block-shards", "2",
)  # fmt: skip


def test_a_run_from_s3_has_the_losses_of_a_local_one_and_reads_each_byte_once_an_epoch(
    directory, llama, gets, tmp_path
):
    sizes = Dataset(directory).shards.columns["bytes"]
    assert len(sizes) > 15
    limit = str(int(sizes.max()) * 6)  # of some twenty shards
    local = ("--order", "block-shuffled", "--out", str(tmp_path / "local"))
    pack("train", directory, "--model", llama, *local, *FLAGS)
    there = ("--cache-dir", str(tmp_path / "cache"), "--cache-limit", limit, "--out", str(tmp_path / "there"))
    result = pack("train", URL, "--model", llama, *there, *FLAGS)
    assert [line["loss"] for line in lines_of(tmp_path / "local")] == [
        line["loss"] for line in lines_of(tmp_path / "there")
    ]
    counts = shards_of(gets)
    assert len(counts) == len(sizes)
    assert sum(counts.values()) <= 2 * 1.2 * len(sizes)
    assert "MB/s" in result.stderr
    assert all("fetched_mb_per_s" in line for line in lines_of(tmp_path / "there"))
    assert json.loads((tmp_path / "there" / "train.json").read_text())["order"] == "block-shuffled"
    assert (tmp_path / "there" / "model" / "tokenizer.json").exists()
    stored = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/shards/*.arrow"))
    assert stored <= int(limit)


def test_a_run_goes_on_with_an_empty_cache_as_on_another_machine(directory, llama, gets, tmp_path):
    run = ("--model", llama, "--packs-per-step", "4", "--dtype", "fp32", "--log-every", "1", "--device", "cpu")
    run = (*run, "--schedule", "constant", "--seed", "3")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pack("train", URL, *run, "--steps", "6", "--out", str(whole), "--cache-dir", str(tmp_path / "one"))
    pack("train", URL, *run, "--steps", "3", "--out", str(parts), "--cache-dir", str(tmp_path / "one"))
    pack("train", URL, *run, "--steps", "6", "--out", str(parts), "--cache-dir", str(tmp_path / "two"), "--resume")
    assert [line["loss"] for line in lines_of(whole)] == [line["loss"] for line in lines_of(parts)]


def test_a_run_goes_on_from_a_checkpoint_on_s3(s3, directory, llama, tmp_path):
    run = ("--model", llama, "--packs-per-step", "4", "--dtype", "fp32", "--log-every", "1", "--device", "cpu")
    run = (*run, "--schedule", "constant", "--save-every", "1")
    there = ("--checkpoint-url", "s3://datasets/runs/first")
    pack("train", directory, *run, "--steps", "5", "--out", str(tmp_path / "whole"))
    pack("train", directory, *run, "--steps", "3", "--out", str(tmp_path / "here"), *there)
    pack("train", directory, *run, "--steps", "5", "--out", str(tmp_path / "elsewhere"), "--resume", *there)
    losses = [line["loss"] for line in lines_of(tmp_path / "elsewhere")]
    assert losses == [line["loss"] for line in lines_of(tmp_path / "whole")][3:]
    s3.invalidate_cache()
    names = sorted(Path(path).name for path in s3.ls("datasets/runs/first"))
    assert names == ["step-00000004", "step-00000005"]
    result = pack("train", directory, *run, "--steps", "5", "--out", str(tmp_path / "other"), *there, code=1)
    assert "--checkpoint-url" in result.stderr
    assert "holds step-00000005 of a run already" in result.stderr


def test_a_cache_below_two_blocks_is_refused_before_anything_is_fetched(directory, llama, gets, tmp_path):
    flags = (
        "--model",
        llama,
        "--out",
        str(tmp_path / "run"),
        "--cache-dir",
        str(tmp_path / "cache"),
        "--device",
        "cpu",
    )
    result = pack("train", URL, *flags, "--cache-limit", "5kB", code=1)
    assert len(result.stderr.strip().splitlines()) == 1
    assert "--cache-limit 5,000 bytes" in result.stderr or "--cache-limit: 5,000 bytes" in result.stderr
    assert "two blocks of 64 shards" in result.stderr
    assert shards_of(gets) == {}


def test_reports_of_s3_are_those_of_the_directory(directory, gets, tmp_path):
    cache = ("--cache-dir", str(tmp_path / "cache"))
    here = json.loads(pack("inspect", directory, "--json").stdout)
    there = json.loads(pack("inspect", URL, "--json", *cache).stdout)
    assert shards_of(gets) == {}  # metadata says it all
    assert there.pop("path") == URL
    assert here.pop("path") == directory
    assert here == there
    assert pack("show", URL, "3", *cache).stdout == pack("show", directory, "3").stdout
    assert max(shards_of(gets).values()) == 1
    assert "intact (full" in pack("verify", URL, *cache).output
    assert len(shards_of(gets)) == len(Dataset(directory).shards)


def test_verify_names_what_is_wrong_on_s3(s3, directory, gets, tmp_path):
    prefix = "datasets/damaged"
    s3.put(directory, prefix, recursive=True)
    s3.invalidate_cache()
    files = Dataset(directory).shards.files()
    data = bytearray(s3.cat_file(f"{prefix}/{files[1]}"))
    data[-50] ^= 4
    s3.pipe_file(f"{prefix}/{files[1]}", bytes(data))
    s3.rm_file(f"{prefix}/{files[4]}")
    s3.pipe_file(f"{prefix}/shards/notes.txt", b"mine")
    s3.invalidate_cache()
    result = pack("verify", f"s3://{prefix}", "--cache-dir", str(tmp_path / "cache"), code=1)
    lines = result.stderr.strip().splitlines()
    assert any(Path(files[1]).name in line and "rule F4" in line for line in lines)
    assert any(Path(files[4]).name in line and "is missing" in line for line in lines)
    assert any("notes.txt" in line and "rule F3" in line for line in lines)
    assert len(lines) == 3


def test_a_store_that_fails_now_and_then_does_not_stop_a_run(s3, directory, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    get_file, attempts = s3.get_file, Counter[str]()

    def shaky(path: str, target: str, **named: Any) -> Any:
        attempts[path] += 1
        if attempts[path] == 1:
            raise ConnectionResetError(104, "Connection reset by peer")
        get_file(path, target, **named)
        if attempts[path] == 2:  # a body that was cut short
            Path(target).write_bytes(Path(target).read_bytes()[:-7])

    monkeypatch.setattr(s3, "get_file", shaky)
    cache = ("--cache-dir", str(tmp_path / "cache"))
    pack("train", URL, "--model", llama, "--out", str(tmp_path / "run"), "--steps", "2", "--device", "cpu", *cache)
    assert set(attempts.values()) == {3}
    assert len(attempts) > 3


def test_a_bucket_that_is_not_there_is_one_line(s3, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    cache = ("--cache-dir", str(tmp_path / "cache"))
    result = pack("inspect", "s3://nobody-has-this/dataset", *cache, code=1)
    assert len(result.stderr.strip().splitlines()) == 1
    assert "is not a shardpack dataset" in result.stderr


def test_a_dataset_of_python_takes_a_url_and_a_cache(directory, gets, tmp_path):
    with_cache = Dataset(URL, cache=Cache(tmp_path / "cache", "1GB"))
    assert [row["num_targets"] for row in with_cache] == [row["num_targets"] for row in Dataset(directory)]
