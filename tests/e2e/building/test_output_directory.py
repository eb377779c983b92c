"""An output directory belongs to one plan at a time; nothing in it is removed that no build wrote."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import BuildConfig, build
from pipeline.building import driver
from pipeline.building.audit import audit_sources
from shards import Dataset, verify
from shards.errors import PackError
from shards.lock import Lock, LockedError
from shards.publish import LocalStore


def lines(number: int, start: int = 0) -> bytes:
    rows = [json.dumps({"text": f"document {k}: " + "word " * (k % 9)}) for k in range(start, start + number)]
    return ("\n".join(rows) + "\n").encode()


@pytest.fixture
def options(tmp_path: Path, tokenizer_dir: str) -> dict[str, Any]:
    (tmp_path / "c.jsonl").write_bytes(lines(120))
    return {
        "sources": tmp_path / "c.jsonl", "out": tmp_path / "out", "tokenizer": tokenizer_dir, "seq_len": 64,
        "window_bytes": 1024, "tokenizer_engine": "tokenizers",
    }  # fmt: skip


def contents(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_second_plan_is_refused_from_the_first_moment_and_the_same_plan_joins(options):
    whole = build(BuildConfig(**options | {"out": options["out"].with_name("whole")}))
    with Lock(LocalStore(options["out"]), whole.plan_id):
        LocalStore(options["out"]).create()
        for changes in ({"seq_len": 32}, {"overwrite": True}, {"overwrite": True, "seq_len": 32}):
            with pytest.raises(LockedError, match="another build writes there"):
                build(BuildConfig(**options | changes))
        there = {path.name for path in options["out"].iterdir()}
        assert there == {"lock.json", "_tmp", "shards", "tokenizer"}  # where the running build is about to write
        assert build(BuildConfig(**options)).manifest["dataset_id"] == whole.manifest["dataset_id"]
    assert not (options["out"] / "lock.json").exists()
    assert verify(options["out"]).ok


def test_the_lock_of_a_build_that_was_killed_is_taken_over(options, tmp_path):
    script = f"""
import os, signal
from pipeline import BuildConfig, build
from pipeline.building import engines
real, done = engines.run_window, []
def run_window(*arguments):
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(1)
    return real(*arguments)
engines.run_window = run_window
build(BuildConfig(**{ {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}!r}))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (options["out"] / "lock.json").exists()
    said: list[str] = []
    listener = driver.Progress()
    listener.on_message = said.append  # type: ignore[method-assign]
    build(BuildConfig(**options, resume=True), listener)
    assert "took over the lock of process" in said[0]
    assert verify(options["out"]).ok


def test_a_window_of_another_plan_is_never_committed(options, monkeypatch):
    other = options["out"].with_name("other")
    build(BuildConfig(**options | {"out": other, "packer": "wrapped"}))
    real = driver.summarize_sidecars

    def plant(store: Any, *arguments: Any) -> Any:
        for name in ("00000001.json", *(path.name for path in other.glob("shards/00000001-*"))):
            shutil.copy(other / "shards" / name, options["out"] / "shards")
        return real(store, *arguments)

    monkeypatch.setattr(driver, "summarize_sidecars", plant)
    with pytest.raises(PackError, match=r"window 1 is of plan .*; expected .*\. Another build wrote there"):
        build(BuildConfig(**options))
    assert not (options["out"] / "manifest.json").exists()


@pytest.mark.parametrize("file", ["tokenizer/tokenizer.json", "tokenizer/notes.txt", "shards/photo.jpg", "_tmp/draft"])
def test_a_users_folder_of_one_of_our_names_is_left_alone(options, file):
    mine = options["out"] / file
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    for overwrite in (False, True):
        if file.startswith("_tmp"):
            build(BuildConfig(**options, overwrite=overwrite))
        else:
            with pytest.raises(PackError, match=rf"holds something else \({file}\)"):
                build(BuildConfig(**options, overwrite=overwrite))
            assert contents(options["out"]) == {file: b"mine"}
        assert mine.read_bytes() == b"mine"


def test_overwriting_leaves_files_beside_the_dataset_and_refuses_those_inside(options):
    build(BuildConfig(**options))
    (options["out"] / "README.md").write_text("mine")
    build(BuildConfig(**options | {"seq_len": 32}, overwrite=True))
    assert (options["out"] / "README.md").read_text() == "mine"
    (options["out"] / "tokenizer" / "corpus.txt").write_text("mine")
    before = contents(options["out"])
    with pytest.raises(PackError, match=r"holds tokenizer/corpus\.txt; expected no file there"):
        build(BuildConfig(**options, overwrite=True))
    assert contents(options["out"]) == before


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_nothing_is_removed_for_a_build_whose_first_records_cannot_be_read(options, on_error):
    build(BuildConfig(**options))
    before = contents(options["out"])
    wrong = driver.replace(BuildConfig(**options, overwrite=True, on_error=on_error).records, text_field="txt")
    with pytest.raises(PackError, match="no field 'txt'"):
        build(BuildConfig(**options, overwrite=True, on_error=on_error, records=wrong))
    assert contents(options["out"]) == before


def test_a_build_that_packs_nothing_leaves_nothing_in_the_way_of_the_corrected_command(options):
    records = BuildConfig(**options).records
    with pytest.raises(PackError, match="no document to pack"):
        build(BuildConfig(**options | {"seq_len": 2}, records=driver.replace(records, overlong="drop")))
    assert not options["out"].exists()
    build(BuildConfig(**options))
    assert verify(options["out"]).ok


def large_corpus(path: Path) -> int:
    """Write more than the samples of a fingerprint cover; return where a digit lies that no sample sees."""
    path.write_bytes(b"".join(lines(1, k) for k in range(8000)))
    size = path.stat().st_size
    assert size > 300_000
    samples = [(0, 64 << 10), (size - (64 << 10), size)]
    samples += [(size * k // 15, size * k // 15 + (4 << 10)) for k in range(1, 15)]
    data = path.read_bytes()
    return next(
        at
        for at in range(size // 2, size)
        if data[at : at + 1].isdigit() and not any(begin <= at < end for begin, end in samples)
    )


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] = ord("1") if data[at] != ord("1") else ord("2")
    path.write_bytes(bytes(data))


def test_one_digit_in_the_middle_of_a_large_file_is_noticed(options):
    at = large_corpus(options["sources"])
    settings = options | {"window_bytes": 64 << 10}
    first = build(BuildConfig(**settings)).manifest
    assert build(BuildConfig(**settings)).manifest == first
    change(options["sources"], at)
    with pytest.raises(PackError, match=r"another version of the corpus: c\.jsonl changed since \(in 1 window\)"):
        build(BuildConfig(**settings))
    second = build(BuildConfig(**settings, overwrite=True)).manifest
    assert second["plan_id"] == first["plan_id"]
    assert second["dataset_id"] != first["dataset_id"]


def test_a_file_that_was_only_touched_is_hashed_and_found_the_same(options):
    first = build(BuildConfig(**options)).manifest
    os.utime(options["sources"], (1, 1))
    assert build(BuildConfig(**options)).manifest == first


def test_a_resumed_build_is_of_one_version_of_the_corpus(options, monkeypatch):
    at = large_corpus(options["sources"])
    settings = options | {"window_bytes": 64 << 10}
    middle = at // (64 << 10)

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver._Build, "_finish", stop)
    with pytest.raises(KeyboardInterrupt):
        build(BuildConfig(**settings))
    (options["out"] / "shards" / "00000000.json").unlink()
    monkeypatch.undo()
    change(options["sources"], at)
    resumed = build(BuildConfig(**settings, resume=True)).manifest
    clean = build(BuildConfig(**settings | {"out": options["out"].with_name("clean")})).manifest
    assert middle > 0
    assert resumed["dataset_id"] == clean["dataset_id"]


def test_a_dataset_below_its_corpus_is_no_part_of_it_however_often_it_is_built(options, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "c.jsonl").write_bytes(lines(60))
    settings = options | {"sources": corpus, "out": corpus / "packed"}
    first = build(BuildConfig(**settings)).manifest
    assert build(BuildConfig(**settings)).manifest == first
    again = build(BuildConfig(**settings, overwrite=True)).manifest
    assert again["dataset_id"] == first["dataset_id"]
    assert first["totals"]["documents"]["read"] == 60


def test_verifying_against_a_corpus_that_changed_since_says_so(options):
    at = large_corpus(options["sources"])
    build(BuildConfig(**options | {"window_bytes": 64 << 10}))
    change(options["sources"], at)
    report = verify(options["out"])
    audit_sources(str(options["out"]), (str(options["sources"]),), report)
    (problem,) = report.problems
    assert "c.jsonl holds other bytes than were packed" in problem.message
    assert "The corpus changed since the build" in problem.message
    assert "Restore" not in problem.message


def test_a_source_that_is_gone_is_named_and_the_disk_is_not_blamed(options, monkeypatch):
    real = driver._Build._summarize

    def summarize(self: Any) -> Any:
        summary = real(self)
        options["sources"].unlink()
        return summary

    monkeypatch.setattr(driver._Build, "_summarize", summarize)
    with pytest.raises(PackError, match=r"c\.jsonl: cannot be read \(No such file or directory\)"):
        build(BuildConfig(**options))


def test_a_change_that_keeps_the_time_of_the_file_is_found_when_asked(options):
    at = large_corpus(options["sources"])
    settings = options | {"window_bytes": 64 << 10}
    build(BuildConfig(**settings))
    status = options["sources"].stat()
    with options["sources"].open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    os.utime(options["sources"], ns=(status.st_atime_ns, status.st_mtime_ns))
    build(BuildConfig(**settings))
    with pytest.raises(PackError, match="another version of the corpus"):
        build(BuildConfig(**settings, check=True))


def test_a_corpus_that_changes_while_it_is_read_is_not_committed(options, monkeypatch):
    at = large_corpus(options["sources"])
    real = driver._Build._summarize

    def summarize(self: Any) -> Any:
        change(options["sources"], at)
        return real(self)

    monkeypatch.setattr(driver._Build, "_summarize", summarize)
    with pytest.raises(PackError, match=r"c\.jsonl: changed while it was read"):
        build(BuildConfig(**options | {"window_bytes": 64 << 10}))
    assert not (options["out"] / "manifest.json").exists()


def test_the_directory_is_read_by_one_function_once(options, monkeypatch):
    build(BuildConfig(**options))
    calls: list[tuple[str, str]] = []

    class Counting(LocalStore):
        def get(self, name: str) -> bytes | None:
            frame = sys._getframe(1)
            calls.append((name, frame.f_code.co_name))
            return super().get(name)

    monkeypatch.setattr(driver, "open_store", Counting)
    build(BuildConfig(**options))
    read = [name for name, _ in calls if name != "lock.json"]
    assert len(read) == len(set(read)) > 5
    assert {caller for name, caller in calls if name != "lock.json"} <= {
        "read_output", "<dictcomp>", "_read_manifest", "list_shards", "read_sidecar",
    }  # fmt: skip


def test_a_dataset_of_one_build_is_readable_while_a_second_one_is_refused(options):
    build(BuildConfig(**options))
    with Lock(LocalStore(options["out"]), "0" * 64):
        assert len(Dataset(options["out"])) > 0
        with pytest.raises(LockedError):
            build(BuildConfig(**options))
