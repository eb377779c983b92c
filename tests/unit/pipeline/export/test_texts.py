"""Documents decoded: the places of targets are characters, whatever the tokens cut in two."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.export.texts import decode
from pipeline.report.decoding import Decoder
from pipeline.tokens import Documents


def documents_of(texts: list[str], tokenizer: str, masks: list[list[int]] | None = None, weights: object = None):
    encoded = [Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode(text).ids for text in texts]
    return Documents(
        input_ids=np.array([token for ids in encoded for token in ids], np.int32),
        offsets=np.cumsum([0, *map(len, encoded)]).astype(np.int64),
        doc_ids=np.arange(len(texts), dtype=np.int64) + 5,
        loss_mask=None if masks is None else np.array([one for mask in masks for one in mask], np.uint8),
        loss_weights=None if weights is None else np.array(weights, np.float16),
    )


def complete_characters(ids: list[int], text: str, tokenizer: str) -> list[int]:
    """By definition: after each number of byte-level tokens, how many characters have all their bytes."""
    reference = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    spelled = [reference.id_to_token(token) for token in ids]
    sizes = np.cumsum([0, *(1 if len(token) == 1 else len(token) for token in spelled)])  # one letter a byte
    ends = np.cumsum([len(character.encode()) for character in text])
    return [int((ends <= size).sum()) for size in sizes]


@pytest.mark.parametrize("text", ["plain words", "naïve 東京 🚀!", "日本語", " leading space", "äöü"])
def test_every_token_that_is_trained_spans_the_characters_it_completes(text, tokenizer_dir):
    ids = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json").encode(text).ids
    complete = complete_characters(ids, text, tokenizer_dir)
    assert complete[-1] == len(text)
    decoder = Decoder(Path(tokenizer_dir))
    for place in range(1, len(ids)):
        mask = [0] * len(ids)
        mask[place] = 1
        (record,) = decode(documents_of([text], tokenizer_dir, [mask]), range(1), decoder)
        assert record["text"] == text
        assert record["targets"] == [[complete[place], complete[place + 1]]]


def test_without_a_mask_everything_behind_the_first_token_is_a_target(tokenizer_dir):
    documents = documents_of(["one two", "x"], tokenizer_dir)
    first, second = decode(documents, range(2), Decoder(Path(tokenizer_dir)))
    begin = len(Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json").decode(documents.input_ids[:1].tolist()))
    assert (first["targets"], first["doc_id"]) == ([[begin, len("one two")]], 5)
    assert (second["text"], second["targets"], second["doc_id"]) == ("x", [], 6)


def test_spans_end_where_weights_change(tokenizer_dir):
    weights = [0, 0.5, 0.5, 2, 0]
    documents = documents_of(["QZXJK"], tokenizer_dir, [[0, 1, 1, 1, 0]], weights)
    assert len(documents.input_ids) == 5
    (record,) = decode(documents, range(1), Decoder(Path(tokenizer_dir)))
    assert (record["targets"], record["weights"]) == ([[1, 3], [3, 4]], [0.5, 2.0])


def test_a_decoder_that_drops_a_leading_space_is_followed(unigram_tokenizer_dir):
    text = "What is the capital of France?"
    ids = Tokenizer.from_file(f"{unigram_tokenizer_dir}/tokenizer.json").encode(text).ids
    place = len(ids) // 2
    mask = [0] * place + [1] * (len(ids) - place)
    (record,) = decode(
        documents_of([text], unigram_tokenizer_dir, [mask]), range(1), Decoder(Path(unigram_tokenizer_dir))
    )
    ((begin, end),) = record["targets"]
    reference = Tokenizer.from_file(f"{unigram_tokenizer_dir}/tokenizer.json")
    assert record["text"][:begin] == reference.decode(ids[:place], skip_special_tokens=False)
    assert end == len(record["text"])
    assert json.dumps(record)
