"""The reference engine on any version of `tokenizers`: ids by the definition of BPE, on a tokenizer made by hand.

No fixture and no other test file is needed, so that it also runs where tokenizers 1.x is installed alone:
`pytest --noconftest tests/unit/pipeline/documents/test_reference.py`.
"""

import json
import random
from itertools import pairwise

import numpy as np
import pytest

from pipeline.documents import engines
from pipeline.documents.encoder import Encoder, hard_texts
from pipeline.documents.engines import ENGINES, REFERENCE, Reference, reference_is_fast, running_sum
from shards.errors import TokenizerError

MERGES = [
    ("e", "r"),
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("Ġ", "the"),
    ("in", "g"),
    ("Ġ", "a"),
    ("o", "n"),
    ("th", "er"),
]
MERGES += [("Ã", "¼"), ("1", "2"), ("12", "3"), ("<", "|"), ("<|", "e"), ("<|e", "|"), ("<|e|", ">")]
CONTROL = "<|e|>"


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}


ALPHABET = byte_alphabet()
VOCABULARY = {piece: index for index, piece in enumerate([*ALPHABET.values(), *("".join(merge) for merge in MERGES)])}


def tokenizer_files(**model: object) -> dict[str, bytes]:
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": VOCABULARY[CONTROL], "content": CONTROL, "special": True, **added},
            {"id": len(VOCABULARY), "content": "covid-19", "special": False, **added},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": VOCABULARY, "merges": [list(merge) for merge in MERGES], **model,
        },
    }  # fmt: skip
    return {"tokenizer.json": json.dumps(content).encode(), "tokenizer_config.json": b"{}"}


def by_definition(text: str, merges: list[tuple[str, str]]) -> list[int]:
    """Byte-level BPE: of all merges that apply, the earliest in the list first, the leftmost place first."""
    ids: list[int] = []
    for number, part in enumerate(text.split("covid-19")):
        if number:
            ids.append(len(VOCABULARY))
        pieces = [ALPHABET[byte] for byte in part.encode()]
        while pairs := [pair for pair in pairwise(pieces) if pair in merges]:
            best = min(pairs, key=merges.index)
            merged: list[str] = []
            while pieces:
                joined = tuple(pieces[:2]) == best
                merged.append("".join(pieces[: 1 + joined]))
                pieces = pieces[1 + joined :]
            pieces = merged
        ids += [VOCABULARY[piece] for piece in pieces]
    return ids


PLAIN_MERGES = [merge for merge in MERGES if merge != ("<|e|", ">")]


def texts() -> list[str]:
    draw = random.Random(3)
    words = ["the", "other", "thing", " a", " on", "ü", "123", "12", CONTROL, "<|e", "covid-19", "\n", "👍", "x", " "]
    return [
        "",
        "a",
        *("".join(draw.choices(words, k=draw.randrange(1, 30))) for _ in range(300)),
        *hard_texts([CONTROL]),
    ]


@pytest.mark.parametrize("engine", [REFERENCE, "auto"])
def test_ids_are_those_of_the_definition_and_no_text_becomes_a_control_token(engine):
    given = texts()
    encoder = Encoder(tokenizer_files(), engine=engine)
    ids, offsets = encoder.encode(given)
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    for index, text in enumerate(given):
        assert ids[offsets[index] : offsets[index + 1]].tolist() == by_definition(text, PLAIN_MERGES), text
    assert VOCABULARY[CONTROL] not in ids
    assert len(VOCABULARY) in ids


def test_control_text_becomes_a_control_token_where_it_may():
    ids, _ = Encoder(tokenizer_files(), engine=REFERENCE, parse_special=True).encode([f"the{CONTROL}ther"])
    assert ids.tolist() == [VOCABULARY["the"], VOCABULARY[CONTROL], VOCABULARY["ther"]]


def test_nothing_and_many_texts_are_flat_arrays(monkeypatch):
    encoder = Encoder(tokenizer_files(), engine=REFERENCE)
    ids, offsets = encoder.encode([])
    assert (ids.tolist(), offsets.tolist()) == ([], [0])
    given = texts()
    whole = encoder.encode(given)
    monkeypatch.setattr(engines, "CHUNK_CHARS", 10)
    for one, other in zip(whole, encoder.encode(given), strict=True):
        assert np.array_equal(one, other)


def test_a_lone_surrogate_is_one_error_of_ours():
    with pytest.raises(TokenizerError, match=r"text 1: lone surrogate U\+D83D at character 2"):
        Encoder(tokenizer_files(), engine=REFERENCE).encode(["fine", "a \ud83d b"])


def test_dropout_is_off():
    given = ["the other thing"] * 20
    ids, _ = Encoder(tokenizer_files(dropout=0.5), engine=REFERENCE).encode(given)
    assert ids.tolist() == by_definition(given[0], PLAIN_MERGES) * 20


def test_what_cannot_be_loaded_is_an_error_of_ours():
    with pytest.raises(TokenizerError, match=r"expected a tokenizer\.json that `tokenizers` can load"):
        Reference(b'{"model": {"type": "nothing"}}')


def test_spans_are_exact_or_refused_in_words():
    encoder = Encoder(tokenizer_files(), engine=REFERENCE)
    if reference_is_fast():
        with pytest.raises(TokenizerError, match=r"tokenizers 1\..*: gives no offsets.*Install 'tokenizers<1'"):
            encoder.encode_with_spans("the thing")
        assert Encoder(tokenizer_files()).facts()["engine"] == REFERENCE, "auto needs no faster engine"
    else:
        ids, spans = encoder.encode_with_spans("the ü")
        assert ids.tolist() == by_definition("the ü", PLAIN_MERGES)
        assert spans.tolist() == [[0, 3], [3, 4], [4, 5]]


def test_running_sums_begin_with_nothing():
    assert running_sum([3, 0, 2]).tolist() == [0, 3, 3, 5]
    assert ENGINES[REFERENCE].version
