"""What a build does with what lies in its output directory, decided without a disk."""

from dataclasses import replace
from typing import Any, cast

import pytest

from pipeline.building.output import (
    Decision,
    OutputState,
    ShardFiles,
    decide,
    owned_files,
)
from pipeline.building.window import Job
from pipeline.config import BuildConfig, RecordOptions
from pipeline.documents.encoder import EngineChoice
from pipeline.sources.windows import Source, SourceFile
from shards.errors import PackError
from shards.manifest import Manifest, datasets_files, digest_files
from shards.plan import make_plan, make_source, plan_id
from shards.publish import canonical

SHARD = "00000000-0123456789abcdef.arrow"
TOKENIZER: Any = {
    "digest": "d", "vocab_size": 8, "max_id": 7, "pad_id": None, "bos_id": None, "eos_id": 1, "prefix_ids": [],
    "suffix_ids": [],
}  # fmt: skip
FILE = SourceFile("c.jsonl", "/c.jsonl", 10, "jsonl", None, "f")


def job(seq_len: int = 64, location: str = "/c.jsonl") -> Job:
    file = replace(FILE, location=location)
    source = Source("corpus", (file,), RecordOptions())
    plan = make_plan(
        recipe=2,
        seq_len=seq_len,
        seed=0,
        position_ids=True,
        packer="auto",
        max_segments=None,
        tokenizer=TOKENIZER,
        sources=[make_source("corpus", {}, [cast("Any", file.as_plan())])],
        windows=[[0, [[0, 0, 10]]]],
        part_bytes=1,
    )
    return Job(plan, plan_id(plan), [source], "out", {"tokenizer.json": b"{}"}, {}, EngineChoice(), "fail")


def config(**changes: Any) -> BuildConfig:
    settings: dict[str, Any] = {"sources": "c.jsonl", "out": "out", "tokenizer": "t", "seq_len": 64}
    return BuildConfig(**settings | changes)


def empty(**changes: Any) -> OutputState:
    """What is there: `files` by directory, each of one byte."""
    sizes: dict[str, dict[str, int]] = {"": {}, "shards": {}, "tokenizer": {}}
    for name in changes.pop("files", ()):
        directory, _, base = name.rpartition("/")
        sizes[directory][base] = 1
    fields = {"plan": None, "manifest": None, "shards": (), "small": {}, "windows": {}, "sizes": sizes}
    return OutputState(location="out", **(fields | changes))


def begun(*more: str, seq_len: int = 64, shards: tuple[str, ...] = (SHARD, "00000000.json")) -> OutputState:
    files = ["plan.json", "tokenizer/tokenizer.json", *(f"shards/{name}" for name in shards), *more]
    return empty(files=files, plan=canonical(job(seq_len).plan))


def finished(*more: str) -> OutputState:
    work = job()
    manifest = cast(
        "Manifest",
        {
            "plan_id": work.plan_id,
            "dataset_id": "a" * 64,
            "index": {"bytes": 1},
            "tokenizer_files": digest_files(work.tokenizer_files),
        },
    )
    names = ("manifest.json", "index.arrow", "shards.arrow", "state.json", "dataset_info.json")
    contents = datasets_files(work.plan, "a" * 64, [f"shards/{SHARD}"])
    small = {name: canonical(content) for name, content in contents.items()} | {"tokenizer/tokenizer.json": b"{}"}
    return replace(begun(*names, *more), manifest=manifest, shards=(ShardFiles(0, f"shards/{SHARD}", 1),), small=small)


def test_an_empty_directory_is_taken():
    assert decide(empty(), config(), job()) == Decision(action="start")
    assert decide(empty(files=["_tmp", "shards", "tokenizer", "lock.json"]), config(), job()).action == "start"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "file", ["notes.txt", "tokenizer/tokenizer.json", "shards/photo.jpg", f"shards/{SHARD}", "plan.json"]
)
def test_what_no_build_wrote_is_refused_and_never_removed(file, overwrite):
    state = empty(files=[file], plan=b'{"format": "a floor plan"}' if file == "plan.json" else None)
    with pytest.raises(PackError, match=rf"holds something else \({file}\); expected an empty or absent directory"):
        decide(state, config(overwrite=overwrite), job())
    assert owned_files(state) == ()


def test_this_plans_own_windows_are_continued_when_asked():
    with pytest.raises(PackError, match=r"unfinished or damaged build of this plan\. Add `resume=True`"):
        decide(begun(), config(), job())
    assert decide(begun(), config(resume=True), job()) == Decision(action="continue")
    assert decide(begun(), config(windows="0::2"), job()).action == "continue"
    assert decide(begun(shards=()), config(), job()).action == "continue"


def test_another_build_is_refused_with_what_differs():
    with pytest.raises(PackError, match=r"holds another build: seq_len 128 there, 64 here\. Choose another `out`"):
        decide(begun(seq_len=128), config(resume=True), job())


def test_a_plan_whose_build_wrote_nothing_is_replaced():
    decision = decide(begun(seq_len=128, shards=()), config(), job())
    assert decision == Decision(action="start", remove=("tokenizer/tokenizer.json", "plan.json"))


def test_a_finished_dataset_is_left_alone():
    state = finished()
    assert decide(state, config(), job()) == Decision(action="finished", manifest=state.manifest)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("content", [None, b"changed"])
def test_a_small_file_that_is_lost_or_changed_is_committed_again(name, content):
    state = finished()
    small = {**state.small, name: content} if content else {k: v for k, v in state.small.items() if k != name}
    state = replace(state, small=small)
    with pytest.raises(PackError, match="Add `resume=True`"):
        decide(state, config(), job())
    assert decide(state, config(resume=True), job()) == Decision(action="continue", remove=("manifest.json",))


@pytest.mark.parametrize("stray", ["shards/notes.txt", "tokenizer/corpus.txt", "shards/00000007.json"])
@pytest.mark.parametrize("changes", [{}, {"resume": True}, {"overwrite": True}])
def test_a_strange_file_among_a_datasets_own_is_named_and_stays(stray, changes):
    for state in (begun(stray), finished(stray)):
        with pytest.raises(PackError, match=rf"holds {stray}; expected no file there beside those of the dataset"):
            decide(state, config(**changes), job())
        assert stray not in owned_files(state)


def test_overwriting_removes_what_the_dataset_lists_and_the_plan_last():
    decision = decide(finished("mine.txt"), config(overwrite=True), job())
    assert decision.action == "start"
    assert decision.remove == (
        "manifest.json", "state.json", "dataset_info.json", "shards.arrow", "index.arrow",
        f"shards/{SHARD}", "shards/00000000.json", "tokenizer/tokenizer.json", "plan.json",
    )  # fmt: skip


def test_a_build_from_stdin_cannot_be_continued():
    work = job(location="-")
    with pytest.raises(PackError, match="holds a build from stdin, which cannot be read again"):
        decide(replace(begun(), plan=canonical(work.plan)), config(resume=True), work)


def test_a_dataset_without_its_plan_says_so():
    state = replace(finished(), plan=None)
    with pytest.raises(PackError, match=r"plan\.json is missing beside manifest\.json"):
        decide(state, config(resume=True), job())
    assert decide(state, config(overwrite=True), job()).action == "start"


def test_finalizing_nothing_is_refused():
    with pytest.raises(PackError, match="`finalize=True` found no window there"):
        decide(empty(), config(finalize=True), job())
