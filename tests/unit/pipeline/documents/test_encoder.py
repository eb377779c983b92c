"""Engines against the reference: flat output, and what becomes of an engine that differs."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
from tokenizer_dirs import load
from tokenizers import normalizers

from pipeline.documents import encoder as tokenizing
from pipeline.documents import engines
from pipeline.documents.encoder import Encoder, EngineChoice, hard_texts
from pipeline.documents.engines import ENGINES, REFERENCE, Engine
from shards.errors import TokenizerError

CONTROL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<unk>"]


def test_where_the_reference_is_fast_itself_auto_takes_no_other(monkeypatch):
    monkeypatch.setattr(engines.metadata, "version", lambda _: "1.0.0rc3")
    assert EngineChoice.named("auto") == EngineChoice()
    monkeypatch.setattr(engines.metadata, "version", lambda _: "0.23.3")
    assert EngineChoice.named("auto").engines == ("fastokens", "gigatoken")


# Flat output


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gives_flat_arrays(tokenizer_dir, engine):
    texts = ["one two", "", "three"]
    ids, offsets = Encoder(tokenizer_dir, engine=engine).encode(texts)
    expected = [load(tokenizer_dir).encode(text).ids for text in texts]
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    assert [ids[a:b].tolist() for a, b in pairwise(offsets)] == expected
    ids, offsets = Encoder(tokenizer_dir, engine=engine).encode([])
    assert ids.tolist() == []
    assert offsets.tolist() == [0]


def test_chunks_of_the_reference_do_not_show(tokenizer_dir, monkeypatch):
    texts = ["one two three", "", "four"] * 20
    whole = Encoder(tokenizer_dir, engine=REFERENCE).encode(texts)
    monkeypatch.setattr(engines, "CHUNK_CHARS", 10)
    parts = Encoder(tokenizer_dir, engine=REFERENCE).encode(texts)
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_offsets_cover_the_characters_that_tokens_stand_for(tokenizer_dir):
    text = "def add(a, b): äöü 👍 </s>"
    encoder = Encoder(tokenizer_dir)
    ids, spans = encoder.encode_with_spans(text)
    assert ids.tolist() == encoder.encode([text])[0].tolist()
    tokenizer = load(tokenizer_dir)
    covered = set()
    for index, (start, stop) in zip(ids.tolist(), spans.tolist(), strict=True):
        covered |= set(range(start, stop))
        piece = tokenizer.decode([index])
        assert piece == text[start:stop] or "\ufffd" in piece, "part of a multi-byte character"
    assert covered == set(range(len(text)))


def test_offsets_count_characters_of_the_text_before_normalization(tokenizer_dir, tmp_path):
    tokenizer = load(tokenizer_dir)
    tokenizer.normalizer = normalizers.NFC()
    shutil.copytree(tokenizer_dir, tmp_path / "t")
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    text = "e\u0301" * 3 + " end"
    _, spans = Encoder(str(tmp_path / "t")).encode_with_spans(text)
    assert spans[-1, 1] == len(text)
    assert text[slice(*spans[-1])] == "d" or text[slice(*spans[-1])].endswith("end")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lone_surrogate_is_one_error_of_ours(tokenizer_dir, engine):
    encoder = Encoder(tokenizer_dir, engine=engine)
    with pytest.raises(TokenizerError, match=r"text 1: lone surrogate U\+D83D at character 2"):
        encoder.encode(["fine", "a \ud83d b"])
    assert not encoder.guard_failed


# The guard


@pytest.fixture
def broken_engine(monkeypatch: pytest.MonkeyPatch):
    """Put an engine first in ENGINES that is the reference but for what `spoil(texts, ids)` does to it."""

    def add(spoil) -> None:
        def open_broken(content: bytes):
            encode = ENGINES[REFERENCE].open(content)

            def wrong(texts):
                ids, offsets = encode(texts)
                return spoil(texts, ids.copy()), offsets

            return wrong

        monkeypatch.setattr(tokenizing, "ENGINES", {"broken": Engine("numpy", open_broken), **ENGINES})

    return add


def test_an_honest_engine_is_used_and_reported(tokenizer_dir, broken_engine):
    broken_engine(lambda texts, ids: ids)
    encoder = Encoder(tokenizer_dir)
    encoder.encode(["some text"] * 50)
    facts = encoder.facts()
    assert facts["engine"] == "broken"
    assert facts["version"] == np.__version__
    assert facts["guard"]["result"] == "equal"
    assert facts["guard"]["checked_documents"] > 50
    assert facts["guard"]["checked_bytes"] > 450


def test_an_engine_that_fails_on_the_fixed_texts_is_never_used(tokenizer_dir, broken_engine):
    def spoil(texts, ids):
        if any("\u200d" in text for text in texts):
            ids[-1] += 1
        return ids

    broken_engine(spoil)
    encoder = Encoder(tokenizer_dir)
    assert encoder.guard_failed
    assert encoder.facts()["engine"] == REFERENCE
    assert encoder.facts()["guard"]["result"] == "differs"
    assert encoder.facts()["guard"]["engine"] == "broken"


@pytest.mark.parametrize("batches_before", [0, 40])
def test_an_engine_that_fails_on_the_corpus_is_dropped_with_the_batch_at_hand(
    tokenizer_dir, broken_engine, monkeypatch, batches_before
):
    monkeypatch.setattr(tokenizing, "SAMPLE_SHARE", 0.5)  # small texts here; the share is a constant elsewhere

    def spoil(texts, ids):
        if any("needle" in text for text in texts):
            ids[0] = (ids[0] + 1) % 300
        return ids

    broken_engine(spoil)
    encoder = Encoder(tokenizer_dir)
    for _ in range(batches_before):
        encoder.encode(["harmless words " * 200])
    assert not encoder.guard_failed
    texts = ["a needle in a haystack " * 400] * 4
    ids, offsets = encoder.encode(texts)
    expected_ids, expected_offsets = Encoder(tokenizer_dir, engine=REFERENCE).encode(texts)
    assert np.array_equal(ids, expected_ids)
    assert np.array_equal(offsets, expected_offsets)
    assert encoder.guard_failed
    assert encoder.facts()["engine"] == REFERENCE


def test_an_engine_that_emits_a_control_token_is_dropped_whatever_the_sample(tokenizer_dir, broken_engine, monkeypatch):
    def spoil(texts, ids):
        if any("rare" in text for text in texts):
            ids[-1] = 1
        return ids

    broken_engine(spoil)
    encoder = Encoder(tokenizer_dir)
    monkeypatch.setattr(encoder, "_sample", lambda texts: [])
    ids, _ = encoder.encode(["a rare case"])
    assert encoder.guard_failed
    assert 1 not in ids.tolist()


def test_an_engine_that_crashes_is_dropped(tokenizer_dir, broken_engine):
    class PanicException(BaseException):
        """What a Rust panic looks like from Python."""

    def spoil(texts, ids):
        if any("boom" in text for text in texts):
            raise PanicException("index out of bounds")
        return ids

    broken_engine(spoil)
    encoder = Encoder(tokenizer_dir)
    assert len(encoder.encode(["boom"])[0]) > 0
    assert encoder.guard_failed


def test_the_running_sample_stays_within_its_share(tokenizer_dir):
    encoder = Encoder(tokenizer_dir)
    heads = encoder._sample(["0123456789abcdef" * 4096] * 20)
    assert sum(len(piece) for piece in heads) >= tokenizing.FIRST_BYTES
    assert max(map(len, heads)) <= tokenizing.PIECE_CHARS
    texts = ["words of the corpus, " * 25_000, "short", "äöü" * 10_000]
    pieces = [piece for _ in range(40) for piece in encoder._sample(texts)]
    assert len(pieces) > 3
    assert all(any(piece in text for text in texts) for piece in pieces)
    checked = sum(len(piece.encode()) for piece in [*heads, *pieces])
    total = sum(len(text.encode()) for text in texts) * 40 + 20 * 65536
    assert checked - tokenizing.FIRST_BYTES <= 0.001 * total


def test_an_engine_that_cannot_hold_the_tokenizer_is_passed_over(unigram_tokenizer_dir):
    encoder = Encoder(unigram_tokenizer_dir)  # neither fast engine knows Unigram
    assert encoder.facts()["engine"] == REFERENCE
    assert not encoder.guard_failed
    with pytest.raises(TokenizerError, match="tokenizer_engine fastokens: cannot be used") as caught:
        Encoder(unigram_tokenizer_dir, engine="fastokens")
    assert "\n" not in str(caught.value)
    with pytest.raises(TokenizerError, match="tokenizer_engine: 'x'; expected auto or one of"):
        Encoder(unigram_tokenizer_dir, engine="x")


def test_the_reference_encodes_until_a_fast_engine_would_have_paid(tokenizer_dir, broken_engine):
    opened = []
    broken_engine(lambda texts, ids: opened.append(len(texts)) or ids)
    encoder = Encoder(tokenizer_dir, engine=EngineChoice(engines=("broken",), patience_chars=100))
    expected, _ = Encoder(tokenizer_dir, engine=REFERENCE).encode(["0123456789" * 5])
    assert np.array_equal(encoder.encode(["0123456789" * 5])[0], expected)
    assert opened == []
    assert encoder.facts()["engine"] == REFERENCE
    assert encoder.facts()["guard"]["result"] == "not needed"
    assert np.array_equal(encoder.encode(["0123456789" * 5])[0], expected)
    assert len(opened) > 1
    assert encoder.facts()["engine"] == "broken"


def test_an_engine_that_is_compared_on_everything_is_caught_by_any_text(tokenizer_dir, broken_engine):
    def spoil(texts, ids):
        if any("needle" in text for text in texts):
            ids[0] = (ids[0] + 1) % 300
        return ids

    broken_engine(spoil)
    texts = ["hay " * 5000] * 20 + ["hay " * 5000 + "needle"] + ["hay " * 5000] * 20
    encoder = Encoder(tokenizer_dir, engine=EngineChoice(engines=("broken",), compare_all=True))
    encoder.encode(texts[:20])
    assert not encoder.guard_failed
    assert encoder.facts()["guard"]["compares_all"]
    assert np.array_equal(encoder.encode(texts)[0], Encoder(tokenizer_dir, engine=REFERENCE).encode(texts)[0])
    assert encoder.guard_failed


@pytest.mark.parametrize("engine", ["fastokens", "gigatoken"])
def test_fast_engines_agree_on_all_hard_texts(tokenizer_dir, engine):
    encoder = Encoder(tokenizer_dir, engine=engine)
    assert not encoder.guard_failed
    assert encoder.facts()["engine"] == engine


@pytest.mark.parametrize("engine", ["fastokens", "gigatoken"])
def test_whatever_an_engine_does_the_ids_are_those_of_the_reference(bos_tokenizer_dir, engine):
    texts = [*hard_texts(CONTROL)]  # fastokens 0.3 reads `<unk>` as a control token here, for one
    ids, offsets = Encoder(bos_tokenizer_dir, engine=engine).encode(texts)
    expected_ids, expected_offsets = Encoder(bos_tokenizer_dir, engine=REFERENCE).encode(texts)
    assert np.array_equal(ids, expected_ids)
    assert np.array_equal(offsets, expected_offsets)
