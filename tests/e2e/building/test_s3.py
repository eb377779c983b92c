"""Corpora and datasets on S3: moto's server on loopback stands for the store."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, build
from pipeline.cli import main
from shards import Dataset, PackError, verify
from shards.fetching.remote import RemoteStore, open_store
from shards.lock import Lock, LockedError

BUCKET = "corpora"


@pytest.fixture(scope="module")
def corpus(s3: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same files here and there."""
    directory = tmp_path_factory.mktemp("here") / "texts"
    directory.mkdir()
    for name in ("a", "b"):
        lines = [
            json.dumps({"text": f"{name}{k}: " + "packing puts documents into rows " * (k % 7 + 1)}) for k in range(60)
        ]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    s3.put(str(directory), f"{BUCKET}/texts", recursive=True)
    return directory


@pytest.fixture
def options(tokenizer_dir: str) -> dict[str, Any]:
    return {"tokenizer": tokenizer_dir, "seq_len": 128, "window_bytes": 4096}


def arrow_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.arrow"))}


def download(s3: Any, name: str, target: Path) -> Path:
    s3.invalidate_cache()
    s3.get(f"{BUCKET}/{name}/", f"{target}/", recursive=True)
    return target


def test_a_dataset_built_on_s3_and_downloaded_is_the_local_one(s3, corpus, options, tmp_path):
    source = (str(corpus / "*.jsonl"),)
    local = build(BuildConfig(sources=source, out=str(tmp_path / "local"), **options)).manifest
    remote = build(BuildConfig(sources=source, out=f"s3://{BUCKET}/out", workers=2, **options)).manifest
    assert remote["dataset_id"] == local["dataset_id"]
    assert local["shards"]["rows"] > 3
    copy = download(s3, "out", tmp_path / "copy")
    report = verify(copy)
    assert report.ok, report.problems
    assert len(Dataset(copy)) == local["totals"]["packs"]
    assert arrow_files(copy) == arrow_files(tmp_path / "local")
    again = build(BuildConfig(sources=source, out=f"s3://{BUCKET}/out", **options)).manifest
    assert again["facts"] == remote["facts"]  # nothing was done


def test_a_corpus_on_s3_gives_the_same_documents(s3, corpus, options, tmp_path):
    build(BuildConfig(sources=(str(corpus / "*.jsonl"),), out=str(tmp_path / "here"), **options))
    build(BuildConfig(sources=(f"s3://{BUCKET}/texts/*.jsonl",), out=str(tmp_path / "there"), **options))
    here, there = Dataset(tmp_path / "here"), Dataset(tmp_path / "there")
    assert len(here) == len(there) > 3
    for left, right in zip(here, there, strict=True):
        assert left["input_ids"].tolist() == right["input_ids"].tolist()
    fingerprints = [file["fingerprint"] for file in there.plan["sources"][0]["files"]]
    assert all(fingerprint.startswith("etag:") for fingerprint in fingerprints)


class BreakingNetwork:
    """Lets some uploading requests through, then breaks every one."""

    def __init__(self, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[str] = []
        self.good = 1 << 30
        real = type(s3)._call_s3

        async def call(filesystem: Any, method: str, *arguments: Any, **named: Any) -> Any:
            if method in ("put_object", "upload_part", "complete_multipart_upload"):
                self.requests.append(method)
                if len(self.requests) > self.good:
                    raise ConnectionResetError(104, "Connection reset by peer")
            return await real(filesystem, method, *arguments, **named)

        monkeypatch.setattr(type(s3), "_call_s3", call)

    def break_after(self, good: int) -> None:
        self.requests.clear()
        self.good = good


def test_an_upload_cut_half_way_leaves_nothing_that_reads_as_a_dataset(s3, corpus, options, tmp_path, monkeypatch):
    config = {"sources": (str(corpus / "*.jsonl"),), **options}
    network = BreakingNetwork(s3, monkeypatch)
    whole = build(BuildConfig(out=f"s3://{BUCKET}/whole", **config)).manifest
    total = len(network.requests)
    assert total > 12
    for good in (2, 5, 6, total - 2, total - 1):
        network.break_after(good)
        with pytest.raises(PackError, match=r"cannot be written \(Connection reset by peer\).*`resume=True`"):
            build(BuildConfig(out=f"s3://{BUCKET}/cut{good}", **config))
        copy = download(s3, f"cut{good}", tmp_path / str(good))
        assert not (copy / "manifest.json").exists()
        assert not verify(copy).ok
        with pytest.raises(PackError, match=r"not a shardpack dataset|unfinished build|no such directory"):
            Dataset(copy)
    network.break_after(1 << 30)
    assert (
        build(BuildConfig(out=f"s3://{BUCKET}/cut6", resume=True, **config)).manifest["dataset_id"]
        == whole["dataset_id"]
    )
    assert 0 < len(network.requests) < total


def test_an_upload_in_parts_that_breaks_stays_invisible(s3, tmp_path, monkeypatch):
    (tmp_path / "large").write_bytes(os.urandom(12 << 20))
    monkeypatch.setattr(s3, "put_file", partial(s3.put_file, chunksize=5 << 20))
    network = BreakingNetwork(s3, monkeypatch)
    for good in (1, 3):
        network.break_after(good)
        with pytest.raises(OSError, match="Connection reset"):
            open_store(f"s3://{BUCKET}/parts").publish(tmp_path / "large", "shards/large.arrow")
        assert "upload_part" in network.requests
        assert open_store(f"s3://{BUCKET}/parts").sizes("shards") == {}
    network.break_after(1 << 30)
    open_store(f"s3://{BUCKET}/parts").publish(tmp_path / "large", "shards/large.arrow")
    assert open_store(f"s3://{BUCKET}/parts").sizes("shards") == {"large.arrow": 12 << 20}


def test_the_manifest_is_put_only_where_there_is_none(s3, corpus, options):
    store = open_store(f"s3://{BUCKET}/race")
    store.put("manifest.json", b"first", if_absent=True)
    with pytest.raises(PackError, match="is there already; another build finished first"):
        store.put("manifest.json", b"second", if_absent=True)
    assert store.get("manifest.json") == b"first"


@pytest.mark.parametrize("where", ["source", "out"])
def test_a_bucket_that_is_not_there_is_one_line(s3, corpus, tokenizer_dir, tmp_path, where):
    source = "s3://nobody-has-this/x.jsonl" if where == "source" else str(corpus / "a.jsonl")
    out = "s3://nobody-has-this/out" if where == "out" else str(tmp_path / "out")
    result = CliRunner().invoke(main, ["build", source, "--out", out, "--tokenizer", tokenizer_dir, "--seq-len", "64"])
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "nobody-has-this" in result.stderr


def test_a_store_without_credentials_is_one_line(s3, corpus, tokenizer_dir, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    type(s3).clear_instance_cache()
    out = f"s3://{BUCKET}/secret"
    result = CliRunner().invoke(
        main, ["build", str(corpus / "a.jsonl"), "--out", out, "--tokenizer", tokenizer_dir, "--seq-len", "64"]
    )
    type(s3).clear_instance_cache()
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "credentials" in result.stderr.lower()


def test_foreign_objects_below_the_prefix_are_never_removed(s3, corpus, options):
    root, source = f"{BUCKET}/shared", (str(corpus / "*.jsonl"),)
    build(BuildConfig(sources=source, out=f"s3://{root}", **options))
    s3.pipe_file(f"{root}/notes.txt", b"mine")
    build(BuildConfig(sources=source, out=f"s3://{root}", overwrite=True, **options | {"seq_len": 64}))
    assert s3.cat_file(f"{root}/notes.txt") == b"mine"
    s3.pipe_file(f"{root}/tokenizer/corpus.txt", b"mine")
    with pytest.raises(PackError, match=r"holds tokenizer/corpus\.txt; expected no file there"):
        build(BuildConfig(sources=source, out=f"s3://{root}", overwrite=True, **options))
    assert s3.cat_file(f"{root}/tokenizer/corpus.txt") == b"mine"
    assert s3.exists(f"{root}/manifest.json")
    assert not s3.exists(f"{root}/lock.json")


def test_one_plan_at_a_time_writes_below_a_prefix(s3, corpus, options):
    out = f"s3://{BUCKET}/locked"
    with Lock(RemoteStore(out), "0" * 64), pytest.raises(LockedError, match="another build writes there"):
        build(BuildConfig(sources=(str(corpus / "*.jsonl"),), out=out, **options))
    assert not s3.exists(f"{BUCKET}/locked/plan.json")
