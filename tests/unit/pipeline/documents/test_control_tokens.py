"""Control text against its ids: what plain text may become, and what it may not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizer_dirs import copy_with, load
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from pipeline.documents.encoder import Encoder, hard_texts
from pipeline.documents.engines import REFERENCE
from pipeline.documents.tokenizer import control_tokens, full_json, load_spec, plain_json


@pytest.mark.parametrize("engine", [REFERENCE, "auto"])
def test_control_text_stays_text(any_dir, engine):
    encoder = Encoder(any_dir, engine=engine)
    spec = encoder.spec
    controls = set(spec.added.values()) - {spec.added.get("<unk>")}
    assert len(spec.added) >= 3
    texts = [form for text in spec.added for form in (text, f"say {text} now", text * 3, f"\n{text}", f"x{text}y")]
    ids, offsets = encoder.encode(texts)
    assert not controls & set(ids.tolist())
    assert (np.diff(offsets) > 1).all(), "control text is spelled by several plain tokens"


def test_control_text_becomes_control_tokens_when_asked(tokenizer_dir):
    encoder = Encoder(tokenizer_dir, parse_special=True)
    ids, _ = encoder.encode(["a</s><think>b"])
    assert ids.tolist() == load(tokenizer_dir).encode("a</s><think>b", add_special_tokens=False).ids
    assert {encoder.spec.added["</s>"], encoder.spec.added["<think>"]} < set(ids.tolist())


def test_text_without_control_text_is_encoded_as_the_whole_tokenizer_does(any_dir):
    tokenizer = load(any_dir)
    ids, offsets = Encoder(any_dir, engine=REFERENCE).encode(texts := list(hard_texts()))
    assert len(texts) > 200
    for index, text in enumerate(texts):
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids[offsets[index] : offsets[index + 1]].tolist() == expected, text


@pytest.mark.parametrize(
    ("model", "pre_tokenizer"),
    [
        (models.WordLevel({"[UNK]": 0, "<c>": 1, "a": 2, "b": 3}, unk_token="[UNK]"), pre_tokenizers.WhitespaceSplit()),
        (
            models.WordPiece({"[UNK]": 0, "<c>": 1, "a": 2, "##b": 3}, unk_token="[UNK]"),
            pre_tokenizers.WhitespaceSplit(),
        ),
        (models.Unigram([("[UNK]", 0.0), ("<c>", 0.0), ("a", -1.0), ("<", -2.0), ("c", -3.0)], 0), None),
        (
            models.BPE(
                {"[UNK]": 0, "<c>": 1, "a": 2, "<": 3, "c": 4, ">": 5}, [], unk_token="[UNK]", ignore_merges=True
            ),
            pre_tokenizers.WhitespaceSplit(),
        ),
        (
            models.BPE({"[UNK]": 0, "<c>": 1, "a": 2, "<": 3, "c": 4, ">": 5, "<c": 6}, [("<", "c"), ("<c", ">")]),
            None,
        ),
    ],
    ids=["WordLevel", "WordPiece", "Unigram", "BPE-ignore-merges", "BPE-merges"],
)
def test_no_model_spells_a_control_token_from_its_own_vocabulary(tmp_path, model, pre_tokenizer):
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens(["[UNK]", "<c>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stripped = json.loads((tmp_path / "tokenizer.json").read_text())
    stripped["added_tokens"] = []
    naive = Tokenizer.from_str(json.dumps(stripped))
    assert 1 in naive.encode("<c>").ids, "the trap is there: without added tokens the model still gives the control id"
    encoder = Encoder(str(tmp_path), engine=REFERENCE)
    assert 1 not in encoder.encode(["<c>", "a <c>", "a<c>a", "[UNK]"])[0].tolist()
    assert encoder.encode(["a"])[0].tolist() == naive.encode("a").ids


def test_white_space_tokens_are_layout_and_keep_their_ids(tokenizer_dir, tmp_path):
    tokenizer = load(tokenizer_dir)
    tokenizer.add_tokens(["<|x|>", "\n\n\n", "<|y|>", "     "])
    shutil.copytree(tokenizer_dir, tmp_path / "t")
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    ids, _ = Encoder(str(tmp_path / "t"), engine=REFERENCE).encode(["a\n\n\nb     c"])
    assert ids.tolist() == tokenizer.encode("a\n\n\nb     c", add_special_tokens=False).ids
    assert tokenizer.token_to_id("\n\n\n") in ids
    assert tokenizer.token_to_id("     ") in ids


def test_padding_truncation_and_post_processor_are_off(tokenizer_dir):
    tokenizer = load(tokenizer_dir)
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(2)
    parsed = json.loads(tokenizer.to_str())
    for content in (plain_json(parsed), full_json(parsed)):
        assert len(Tokenizer.from_buffer(content).encode("one two three").ids) not in (2, 50)
    assert "</s>" in control_tokens(parsed)


# Words that somebody added


@pytest.mark.parametrize("fixture", ["tokenizer_dir", "bos_tokenizer_dir", "unigram_tokenizer_dir"])
@pytest.mark.parametrize("engine", [REFERENCE, "auto"])
def test_an_added_word_without_the_form_of_a_mark_is_a_word_as_it_is_at_inference(request, tmp_path, fixture, engine):
    directory = request.getfixturevalue(fixture)
    tokenizer = load(directory)
    tokenizer.add_tokens(["<extra>", "shardpack", AddedToken("covid-19", normalized=False)])
    shutil.copytree(directory, tmp_path / "t")
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    encoder = Encoder(str(tmp_path / "t"), engine=engine)
    texts = ["shardpack is new", "a covid-19 year", "xshardpacky covid-19covid-19", "SHARDPACK covid-1", "shard pack"]
    ids, offsets = encoder.encode(texts)
    for text, begin, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
        assert ids[begin:end].tolist() == tokenizer.encode(text, add_special_tokens=False).ids, text
    assert {tokenizer.token_to_id("shardpack"), tokenizer.token_to_id("covid-19")} < set(ids.tolist())
    assert "<extra>" in encoder.spec.added
    assert "shardpack" not in encoder.spec.added
    assert tokenizer.token_to_id("<extra>") not in encoder.encode(["an <extra> mark"])[0]


@pytest.mark.parametrize(
    ("text", "flags", "control"),
    [
        ("<tool_call>", {}, True),
        ("[INST]", {}, True),
        ("{{x}}", {}, True),
        ("<｜User｜>", {}, True),
        ("END", {"special": True}, True),
        ("word", {}, False),
        ("two words", {}, False),
        ("a<b", {}, False),
        ("[open", {}, False),
        ("word", {"single_word": True}, False),
    ],
)
def test_special_flags_and_the_form_of_a_mark_make_a_control_token(text, flags, control):
    parsed = {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": [{"content": text, "id": 1, **flags}]}
    assert (text in control_tokens(parsed)) is control
    assert text in control_tokens(parsed, [text]), "a token with a role is no word, whatever it looks like"


def test_a_word_that_must_stand_alone_is_kept_where_merges_decide_alone():
    token = {"content": "word", "id": 1, "single_word": True}
    for model in ({"vocab": {"a": 0}}, {"vocab": {"a": 0}, "merges": [], "ignore_merges": True}):
        assert "word" in control_tokens({"model": model, "added_tokens": [token]})


def test_texts_that_spell_control_tokens_are_counted_unless_they_become_some(tokenizer_dir):
    texts = ["plain", "a </s> b </s>", "<s", "<think>", "[x] </ s>", "ends with <|im_end|>"]
    encoder = Encoder(tokenizer_dir, engine=REFERENCE)
    encoder.encode(texts)
    assert encoder.spelled.take() == {"texts": 3, "example": "</s>"}
    assert encoder.spelled.take() == {}
    special = Encoder(tokenizer_dir, engine=REFERENCE, parse_special=True)
    special.encode(texts)
    assert special.spelled.take() == {}


# Chance and code


@pytest.mark.parametrize("engine", [REFERENCE, "auto"])
@pytest.mark.parametrize("parse_special", [False, True])
def test_bpe_dropout_is_off(tokenizer_dir, tmp_path, engine, parse_special):
    model = json.loads(Path(tokenizer_dir, "tokenizer.json").read_text("utf-8"))["model"]
    noisy = copy_with(tokenizer_dir, tmp_path / "t", tokenizer={"model": {**model, "dropout": 0.5}})
    texts = ["The quick brown fox jumps over the lazy dog"] * 20
    assert len({tuple(load(noisy).encode(text).ids) for text in texts}) > 1, "the trap is there"
    expected, _ = Encoder(tokenizer_dir, engine=REFERENCE, parse_special=parse_special).encode(texts)
    encoder = Encoder(noisy, engine=engine, parse_special=parse_special)
    assert np.array_equal(encoder.encode(texts)[0], expected)
    assert (encoder.spec.dropout, load_spec(tokenizer_dir)[0].dropout) == (0.5, 0.0)
