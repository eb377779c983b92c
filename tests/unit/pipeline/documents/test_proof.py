"""What proves a fast engine: every character in both forms, once for a tokenizer and the engines' versions."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.documents import proof as proofs
from pipeline.documents.engines import ENGINES, REFERENCE, Engine
from pipeline.documents.proof import (
    NUM_SCALARS,
    Proof,
    ProofProcess,
    add_waited,
    keep_proof,
    kept_proof,
    prove,
    prove_first,
    scalar_values,
)


@pytest.fixture
def content(tokenizer_dir: str) -> bytes:
    return Path(tokenizer_dir, "tokenizer.json").read_bytes()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardpack" / "proofs"


def spoiled(wrong):
    """An engine that gives the reference's ids, but for texts of which `wrong` is true."""

    def open_spoiled(content: bytes):
        encode = ENGINES[REFERENCE].open(content)

        def spoil(texts):
            ids, offsets = encode(texts)
            ids = ids.copy()
            for index, text in enumerate(texts):
                if wrong(text):
                    ids[offsets[index]] += 1
            return ids, offsets

        return spoil

    return Engine("numpy", open_spoiled)


def test_the_scalar_values_are_all_code_points_but_surrogates():
    values = list(scalar_values())
    assert len(values) == len(set(values)) == NUM_SCALARS == 1_112_064
    assert (values[0], values[-1]) == ("\x00", "\U0010ffff")
    assert "\ud7ff" in values
    "".join(values).encode("utf-8")


@pytest.mark.parametrize("text", ["\u0cdc", "a\u0cdc'S"], ids=["alone", "between a letter and 'S"])
def test_one_character_in_one_form_is_enough_to_differ(content, monkeypatch, text):
    monkeypatch.setitem(ENGINES, "spoiled", spoiled(lambda given: given == text))
    scalars = [chr(code) for code in range(0x0C80, 0x0D00)]
    found = prove(content, "spoiled", scalars)
    assert (found.result, found.example) == ("differs", text)
    assert (found.engine, found.version) == ("spoiled", np.__version__)
    honest = [one for one in scalars if one != "\u0cdc"]
    assert prove(content, "spoiled", honest).result == "equal"
    assert prove(content, "spoiled", honest).scalars == len(honest) == 127


def test_a_difference_in_a_late_batch_is_found(content, monkeypatch):
    monkeypatch.setattr(proofs, "BATCH", 16)
    monkeypatch.setitem(ENGINES, "spoiled", spoiled(lambda given: given == "Z"))
    scalars = [chr(code) for code in range(32, 127)]
    assert prove(content, "spoiled", scalars).example == "Z"


def test_an_engine_that_cannot_hold_the_tokenizer_leaves_the_place_to_the_next(content, monkeypatch):
    def fails(_: bytes):
        raise ValueError("unsupported model type")

    monkeypatch.setitem(ENGINES, "picky", Engine("numpy", fails))
    monkeypatch.setitem(ENGINES, "spoiled", spoiled(lambda given: given == "b"))
    monkeypatch.setattr(proofs, "scalar_values", lambda: iter("abc"))
    found = prove_first(content, ["picky", "spoiled", "fastokens"])
    assert [(one.engine, one.result) for one in found] == [("picky", "cannot"), ("spoiled", "differs")]
    assert found[0].sentence() == f"picky {np.__version__} cannot hold this tokenizer"


def test_an_engine_that_crashes_differs(content, monkeypatch):
    def open_crashing(content: bytes):
        def crash(texts):
            raise RuntimeError("boom")

        return crash

    monkeypatch.setitem(ENGINES, "crashing", Engine("numpy", open_crashing))
    assert prove(content, "crashing", "ab").result == "differs"


def test_a_proof_is_kept_for_its_tokenizer_and_versions_until_it_is_damaged(content, empty_cache, monkeypatch):
    monkeypatch.setitem(ENGINES, "honest", spoiled(lambda given: False))
    assert kept_proof(content, "honest") is None
    found = prove(content, "honest", "abc")
    keep_proof(content, found)
    assert kept_proof(content, "honest") == found
    assert kept_proof(content + b" ", "honest") is None
    (file,) = empty_cache.iterdir()
    monkeypatch.setitem(ENGINES, "honest", Engine("pytest", ENGINES["honest"].open))
    assert kept_proof(content, "honest") is None, "another version of the engine"
    monkeypatch.setitem(ENGINES, "honest", Engine("numpy", ENGINES["honest"].open))
    file.write_bytes(file.read_bytes().replace(b"equal", b"wrong"))
    assert kept_proof(content, "honest") is None


def test_where_nothing_can_be_kept_a_proof_still_stands(content, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for name in ("XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    keep_proof(content, prove(content, "fastokens", "abc"))
    assert kept_proof(content, "fastokens") is None
    assert add_waited(content, 5) == 5


def test_bytes_that_waited_for_a_proof_add_up(content, empty_cache):
    assert add_waited(content, 10) == 10
    assert add_waited(content, 5) == 15
    assert add_waited(content + b" ", 1) == 1
    assert empty_cache.is_dir()


def test_a_process_of_its_own_answers_what_it_found(unigram_tokenizer_dir, empty_cache):
    unigram = Path(unigram_tokenizer_dir, "tokenizer.json").read_bytes()
    process = ProofProcess(unigram, ("fastokens", "gigatoken"))  # neither can hold a Unigram model
    found = process.result()
    assert [(one.engine, one.result, one.scalars) for one in found] == [
        ("fastokens", "cannot", 0),
        ("gigatoken", "cannot", 0),
    ]
    assert kept_proof(unigram, "gigatoken") == found[1]
    process.stop()
    stopped = ProofProcess(unigram, ("fastokens",))
    stopped.stop()
    assert stopped._process.returncode is not None


def test_the_sentence_names_engine_versions_and_what_was_found():
    found = Proof(
        engine="fast", version="1.2", reference="0.23.3", result="equal", scalars=NUM_SCALARS, example="", seconds=14.6
    )
    assert found.sentence() == (
        "fast 1.2 gives the ids of tokenizers 0.23.3 on 1,112,064 characters (15 s, once for these versions and this "
        "tokenizer)"
    )
    differs = Proof(**{**vars(found), "result": "differs", "example": "a\u0cdc'S"})
    assert 'gives other ids than tokenizers 0.23.3 for "a\\u0cdc' in differs.sentence()
