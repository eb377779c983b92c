"""Which engine a build uses: the reference where it is done sooner, a fast one where it is proven or about to be."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import BuildConfig, build
from pipeline.building import startup
from pipeline.building.startup import LOAD_BYTES, PROOF_BYTES, EngineTrust
from pipeline.documents.encoder import EngineChoice
from pipeline.documents.engines import ENGINES, REFERENCE
from pipeline.documents.proof import Proof, keep_proof
from shards import verify

FAST = ("fastokens", "gigatoken")


@pytest.fixture
def content(tokenizer_dir, tmp_path, monkeypatch) -> bytes:
    """A tokenizer that nothing is known of yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(tokenizer_dir, "tokenizer.json").read_bytes()


class Process:
    """Stands for the process that finds a proof: it answers at once, what the test says."""

    answer = "equal"

    def __init__(self, content: bytes, engines: tuple[str, ...]) -> None:
        self.content, self.engine, self.stopped = content, engines[0], False

    def result(self) -> list[Proof]:
        found = proof_of(self.engine, self.answer)
        keep_proof(self.content, found)
        return [found]

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    monkeypatch.setattr(startup, "ProofProcess", Process)


def proof_of(engine: str, result: str) -> Proof:
    return Proof(
        engine=engine, version=ENGINES[engine].version, reference=ENGINES[REFERENCE].version, result=result, scalars=9
    )


def trust(
    content: bytes, raw_bytes: int | None, asked: str = "auto", workers: int = 2
) -> tuple[EngineTrust, list[str]]:
    said: list[str] = []
    return EngineTrust([content], asked, raw_bytes, workers, said.append), said


def test_a_corpus_that_the_reference_finishes_sooner_sees_no_fast_engine(content):
    keep_proof(content, proof_of("fastokens", "equal"))
    assert trust(content, 2 * LOAD_BYTES)[0].choice == EngineChoice()
    assert trust(content, 2 * LOAD_BYTES + 1)[0].choice == EngineChoice(engines=FAST)
    assert trust(content, 3 * LOAD_BYTES, workers=4)[0].choice == EngineChoice(), "each worker would have to load it"


def test_without_a_proof_builds_wait_until_one_would_have_paid(content):
    size = PROOF_BYTES // 2
    first, said = trust(content, size)
    assert first.choice == EngineChoice()
    assert not first.processes
    trust(content, size)
    third, said = trust(content, size)
    assert third.choice == EngineChoice(engines=FAST)
    assert list(third.processes) == [content]
    assert said == ["comparing fastokens with tokenizers on every character, once for this tokenizer, beside the build"]
    third.stop()
    assert third.processes[content].stopped


def test_a_corpus_of_unknown_size_begins_with_the_reference(content):
    assert trust(content, None)[0].choice == EngineChoice(engines=FAST, patience_chars=PROOF_BYTES)
    keep_proof(content, proof_of("fastokens", "equal"))
    assert trust(content, None)[0].choice == EngineChoice(engines=FAST, patience_chars=LOAD_BYTES)


@pytest.mark.parametrize("result", ["differs", "cannot"])
def test_an_engine_that_failed_leaves_the_place_to_the_next(content, result):
    keep_proof(content, proof_of("fastokens", result))
    keep_proof(content, proof_of("gigatoken", "equal"))
    assert trust(content, 1 << 30)[0].choice == EngineChoice(engines=("gigatoken",))
    keep_proof(content, proof_of("gigatoken", "differs"))
    assert trust(content, 1 << 30)[0].choice == EngineChoice()


def test_an_engine_that_the_user_asked_for_is_compared_on_all_of_a_small_corpus(content):
    asked, said = trust(content, 1000, "gigatoken")
    assert asked.choice == EngineChoice(engines=("gigatoken",), required=True, compare_all=True)
    assert (asked.processes, said) == ({}, [])
    large, said = trust(content, 1 << 30, "gigatoken")
    assert large.choice == EngineChoice(engines=("gigatoken",), required=True)
    assert len(large.processes) == len(said) == 1
    keep_proof(content, proof_of("gigatoken", "differs"))
    refused, said = trust(content, 1000, "gigatoken")
    assert refused.choice == EngineChoice()
    assert said[0].startswith("gigatoken ")
    assert said[0].endswith("tokenizers is used")
    assert trust(content, 1000, REFERENCE)[0].choice == EngineChoice()


@pytest.mark.parametrize("answer", ["equal", "differs"])
def test_what_wrote_windows_is_settled_before_the_commit(content, monkeypatch, answer):
    monkeypatch.setattr(Process, "answer", answer)
    beside, said = trust(content, 1 << 30)
    used = {("fastokens", ENGINES["fastokens"].version)}
    assert [(proof.engine, proof.result) for proof in beside.settle(used)] == [("fastokens", answer)]
    assert len(said) == 2
    again, _ = trust(content, 1 << 30)
    assert [proof.result for proof in again.settle(used)] == [answer]
    assert ("fastokens" in again.choice.engines) is (answer == "equal")
    assert again.settle({("fastokens", "0.0.1")}) == [], "no proof can be found for a version that is not here"
    assert again.settle(()) == []


@pytest.mark.parametrize(("answer", "engine"), [("equal", "fastokens"), ("differs", REFERENCE)])
def test_a_build_takes_back_what_an_engine_wrote_that_differs_on_any_character(
    tokenizer_dir, tmp_path, monkeypatch, answer, engine
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Process, "answer", answer)
    monkeypatch.setattr(startup, "PROOF_BYTES", 0)
    monkeypatch.setattr(startup, "LOAD_BYTES", 0)
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "one two three"}\n' * 40)
    manifest = build(
        BuildConfig(
            sources=(str(corpus),), out=str(tmp_path / "out"), tokenizer=tokenizer_dir, seq_len=32, window_bytes=300
        )
    ).manifest
    assert len(manifest["shards"]) > 1
    assert {fact["engine"] for fact in manifest["facts"]["tokenizer"]} == {engine}
    proofs = [(proof["engine"], proof["result"]) for proof in manifest["facts"]["tokenizer_proofs"]]
    assert proofs == [("fastokens", answer)]
    assert verify(tmp_path / "out").ok


def test_workers_come_from_the_server_that_was_started_whatever_compiling_settles_on_meanwhile():
    code = (
        "import multiprocessing\n"
        "from pipeline.building import engines\n"
        "engines.start_server()\n"
        "multiprocessing.set_start_method('fork', force=True)\n"
        "print(engines._context().get_start_method())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "forkserver", done.stderr
