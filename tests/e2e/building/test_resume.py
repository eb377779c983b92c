"""What a build finds in its output directory: nothing old is reused unless it is this plan's, whole and unchanged."""

import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import pipeline.building.driver
import pipeline.building.engines
from pipeline import BuildConfig, build
from shards import Dataset, PackError, verify
from shards.publish import seal


def lines(number: int, word: str = "packing") -> bytes:
    return "".join(json.dumps({"text": f"{k}: {word} puts rows into rows"}) + "\n" for k in range(number)).encode()


@pytest.fixture
def options(tmp_path: Path, tokenizer_dir: str) -> dict[str, Any]:
    (tmp_path / "c.jsonl").write_bytes(lines(100))
    return {
        "sources": (str(tmp_path / "c.jsonl"),), "out": str(tmp_path / "out"), "tokenizer": tokenizer_dir,
        "seq_len": 64, "window_bytes": 1000,
    }  # fmt: skip


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The windows that were built, in order."""
    windows: list[int] = []
    real = pipeline.building.engines.run_window

    def run(job: Any, task: Any, *rest: Any) -> Any:
        windows.append(task.window)
        return real(job, task, *rest)

    monkeypatch.setattr(pipeline.building.engines, "run_window", run)
    return windows


def interrupt(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], at_window: int) -> None:
    """Build until a window, then stop."""
    real = pipeline.building.engines.run_window

    def run(job: Any, task: Any, *rest: Any) -> Any:
        if task.window == at_window:
            raise KeyboardInterrupt
        return real(job, task, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.building.engines, "run_window", run)
        with pytest.raises(KeyboardInterrupt):
            build(BuildConfig(**options))


DAMAGES = [
    "a shard is missing",
    "a shard is cut off",
    "a sidecar is gone",
    "the index is gone",
    "the manifest is broken",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_dataset_is_mended_by_resume_alone(options, ran, damage):
    whole = build(BuildConfig(**options)).manifest
    out = Path(options["out"])
    shard, sidecar = out / Dataset(out).shards[2]["file"], out / "shards" / "00000002.json"
    if damage == "a shard is missing":
        shard.unlink()
    elif damage == "a shard is cut off":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "a sidecar is gone":
        sidecar.unlink()
    elif damage == "the index is gone":
        (out / "index.arrow").unlink()
    else:
        (out / "manifest.json").write_text("{}")
    ran.clear()
    with pytest.raises(PackError, match=r"damaged build of this plan. Add `resume=True`"):
        build(BuildConfig(**options))
    resumed = build(BuildConfig(**options, resume=True)).manifest
    assert ran == ([2] if "shard" in damage or "sidecar" in damage else [])
    assert resumed["dataset_id"] == whole["dataset_id"]
    assert verify(out).ok


def files_but_the_manifest(out: str) -> dict[Path, bytes]:
    """The manifest holds facts about the run that committed."""
    return {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file() and path.name != "manifest.json"}


@pytest.mark.parametrize("damage", ["lost", "changed"])
@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "tokenizer", "tokenizer/tokenizer.json"])
def test_small_files_beside_whole_shards_are_written_again_without_building_a_window(options, ran, name, damage):
    first = build(BuildConfig(**options)).manifest
    place = Path(options["out"]) / name
    before = files_but_the_manifest(options["out"])
    if place.is_dir():
        shutil.rmtree(place)
    elif damage == "lost":
        place.unlink()
    else:
        place.write_bytes(place.read_bytes()[:-1] + b" ")
    ran.clear()
    with pytest.raises(PackError, match=r"damaged build of this plan. Add `resume=True`"):
        build(BuildConfig(**options))
    again = build(BuildConfig(**options, resume=True)).manifest
    assert ran == []
    assert before == files_but_the_manifest(options["out"])
    assert again | {"facts": first["facts"]} == first
    assert verify(options["out"]).ok


def test_a_tokenizer_that_is_written_otherwise_does_not_make_a_whole_dataset_a_damaged_one(options, ran, tmp_path):
    first = build(BuildConfig(**options)).manifest
    copy = Path(shutil.copytree(options["tokenizer"], tmp_path / "copy"))
    text = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(text))
    ran.clear()
    assert build(BuildConfig(**options | {"tokenizer": str(copy)})).manifest == first | {"facts": first["facts"]}
    (Path(options["out"]) / "tokenizer" / "tokenizer.json").unlink()
    build(BuildConfig(**options | {"tokenizer": str(copy)}, resume=True))
    assert ran == []
    assert verify(options["out"]).ok


@pytest.mark.parametrize("name", ["shards/notes.txt", "shards/00000099-" + "0" * 16 + ".arrow", "tokenizer/notes.txt"])
def test_files_of_others_in_a_finished_dataset_are_named_and_kept(options, name):
    build(BuildConfig(**options))
    stray = Path(options["out"]) / name
    stray.write_text("mine")
    for resume in (False, True):
        with pytest.raises(PackError, match=rf"holds {name}; expected no file there .* Move them away"):
            build(BuildConfig(**options, resume=resume))
    assert stray.read_text() == "mine"
    stray.unlink()
    build(BuildConfig(**options, resume=True))
    assert verify(options["out"]).ok


def test_files_of_others_in_an_unfinished_build_are_named_and_kept(options, monkeypatch):
    interrupt(monkeypatch, options, at_window=2)
    stray = Path(options["out"]) / "shards" / "notes.txt"
    stray.write_text("mine")
    with pytest.raises(PackError, match=r"holds shards/notes\.txt; expected no file there"):
        build(BuildConfig(**options, resume=True))
    assert stray.read_text() == "mine"


def test_a_dataset_without_its_plan_says_so_and_is_built_again_by_overwrite(options, ran):
    first = build(BuildConfig(**options)).manifest
    (Path(options["out"]) / "plan.json").unlink()
    for resume in (False, True):
        with pytest.raises(
            PackError, match=r"plan\.json is missing beside manifest\.json.* again with `overwrite=True`"
        ):
            build(BuildConfig(**options, resume=resume))
    ran.clear()
    assert build(BuildConfig(**options, overwrite=True)).manifest["dataset_id"] == first["dataset_id"]
    assert len(ran) == first["shards"]["rows"]
    assert verify(options["out"]).ok


def test_the_manifest_of_another_program_does_not_make_a_directory_ours(options):
    out = Path(options["out"])
    out.mkdir()
    (out / "manifest.json").write_bytes(seal({"format": "another"}))
    with pytest.raises(PackError, match=r"holds something else \(manifest\.json\)"):
        build(BuildConfig(**options, overwrite=True))
    assert [path.name for path in out.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("folder", ["shards", "tokenizer", "_tmp"])
@pytest.mark.parametrize("changes", [{"resume": True}, {"overwrite": True, "seq_len": 32}])
def test_nothing_is_written_or_removed_through_a_link_out_of_the_dataset(options, monkeypatch, folder, changes):
    interrupt(monkeypatch, options, 1)
    inside, elsewhere = Path(options["out"]) / folder, Path(options["out"]).with_name("elsewhere")
    inside.mkdir(exist_ok=True)
    inside.rename(elsewhere)
    inside.symlink_to(elsewhere)
    (elsewhere / "minutes-2026-11").write_text("mine")  # named like unpublished work
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    with pytest.raises(PackError, match=f"{folder}: is a link; expected a directory|holds "):
        build(BuildConfig(**options | changes))
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_finalize_where_nothing_was_built_makes_no_directory(options):
    with pytest.raises(
        PackError, match=r"`finalize=True` found no window there.* Run every part first: --windows i::n"
    ):
        build(BuildConfig(**options, finalize=True))
    assert not Path(options["out"]).exists()


def test_finalize_names_the_part_that_has_a_missing_window(options):
    build(BuildConfig(**options, windows="0::3"))
    with pytest.raises(PackError, match=r"window 1 of \d+ is missing.*\(--windows i::n, where i is 1 modulo n\)"):
        build(BuildConfig(**options, finalize=True))


@pytest.mark.parametrize("change", ["corpus", "tokenizer", "option"])
def test_a_change_of_anything_that_matters_is_refused_on_resume(
    options, monkeypatch, tmp_path, other_tokenizer_dir, change
):
    interrupt(monkeypatch, options, at_window=2)
    if change == "corpus":
        content = (tmp_path / "c.jsonl").read_bytes()
        (tmp_path / "c.jsonl").write_bytes(content.replace(b"50: packing", b"50: gnikcap"))  # the same size
    elif change == "tokenizer":
        options |= {"tokenizer": other_tokenizer_dir}
    else:
        options |= {"packer": "next-fit"}
    expected = {
        "corpus": r"source corpus: c\.jsonl has changed",
        "tokenizer": "another tokenizer",
        "option": "packer auto there, next-fit here",
    }
    with pytest.raises(PackError, match=f"holds another build: {expected[change]}"):
        build(BuildConfig(**options, resume=True))


def test_a_corpus_that_changes_during_the_build_is_noticed(options, monkeypatch, tmp_path):
    real = pipeline.building.engines.run_window

    def run(job: Any, task: Any, *rest: Any) -> Any:
        record = real(job, task, *rest)
        if task.window == 2:
            (tmp_path / "c.jsonl").write_bytes(lines(100, "gnikcap"))
        return record

    monkeypatch.setattr(pipeline.building.engines, "run_window", run)
    with pytest.raises(PackError, match=r"c\.jsonl: changed while it was read"):
        build(BuildConfig(**options))
    with pytest.raises(PackError, match="unfinished build"):
        Dataset(options["out"])


def test_a_compressed_file_is_read_again_on_resume_but_its_windows_are_kept(options, ran, monkeypatch, tmp_path):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(lines(100)))
    options |= {"sources": (str(path),)}
    whole = build(BuildConfig(**options | {"out": str(tmp_path / "whole")})).manifest
    interrupt(monkeypatch, options, at_window=3)
    ran.clear()
    resumed = build(BuildConfig(**options, resume=True)).manifest
    assert ran == list(range(3, whole["shards"]["rows"]))
    assert resumed["dataset_id"] == whole["dataset_id"]


def test_a_streamed_window_of_other_bytes_is_built_again(options, ran, monkeypatch, tmp_path):
    """Should a file change without its fingerprint telling, what was streamed from it before is not reused."""
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(lines(100)))
    options |= {"sources": (str(path),)}
    monkeypatch.setattr("pipeline.sources.discovery.fingerprint", lambda location: "the same")
    monkeypatch.setattr("pipeline.sources.discovery.size_of", lambda location: 1000)
    interrupt(monkeypatch, options, at_window=3)
    path.write_bytes(gzip.compress(lines(100).replace(b"40: packing", b"40: gnikcap")))
    ran.clear()
    build(BuildConfig(**options, resume=True))
    assert len(ran) == len(Dataset(options["out"]).shards) - 2
    assert verify(options["out"]).ok


def test_stdin_is_never_taken_for_what_was_read_before(options, monkeypatch):
    options |= {"sources": ("-",)}

    def give(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    give(lines(50))
    first = build(BuildConfig(**options)).manifest
    give(lines(50, "gnikcap"))
    for resume in (False, True):
        with pytest.raises(PackError, match="a build from stdin, which cannot be read again"):
            build(BuildConfig(**options, resume=resume))
    second = build(BuildConfig(**options, overwrite=True)).manifest
    assert second["dataset_id"] != first["dataset_id"]
    assert verify(options["out"]).ok


@pytest.mark.parametrize("part", [{"windows": "0::2"}, {"finalize": True}])
def test_parts_of_a_job_array_cannot_share_a_stream(options, tmp_path, part):
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines(10)))
    with pytest.raises(PackError, match=r"c\.jsonl\.gz cannot be cut unread"):
        build(BuildConfig(**options | {"sources": (str(tmp_path / "c.jsonl.gz"),)}, **part))


def test_two_last_parts_at_once_both_succeed(options, monkeypatch):
    """Both find every window there, and both commit; the second finds the first one's dataset."""
    whole = build(BuildConfig(**options)).manifest
    out = Path(options["out"])
    (out / "manifest.json").unlink()
    real, finished = pipeline.building.driver.commit, []

    def commit(*arguments: Any) -> Any:
        if not finished:
            finished.append(1)
            build(BuildConfig(**options, finalize=True))
        return real(*arguments)

    monkeypatch.setattr("pipeline.building.driver.commit", commit)
    assert build(BuildConfig(**options, finalize=True)).manifest["dataset_id"] == whole["dataset_id"]
    assert finished
    assert verify(out).ok


def test_stages_and_waiting_are_booked(options):
    stages = build(BuildConfig(**options)).manifest["facts"]["stages_s"]
    assert set(stages) == {"load", "read", "tokenize", "pack", "assemble", "write", "wait"}
    assert min(stages.values()) >= 0
