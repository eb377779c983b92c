"""Tokenizers: specs against transformers, control text against its ids, engines against the reference."""

import json
import logging
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from pipeline.documents import encoder as tokenizing
from pipeline.documents import engines
from pipeline.documents.encoder import Encoder, EngineChoice, hard_texts
from pipeline.documents.engines import ENGINES, REFERENCE, Engine
from pipeline.documents.tokenizer import control_tokens, full_json, load_spec, plain_json, spec_from_files
from shards.errors import TokenizerError

FIXTURES = ["tokenizer_dir", "other_tokenizer_dir", "bos_tokenizer_dir", "unigram_tokenizer_dir"]
CONTROL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<unk>"]


@pytest.fixture(params=FIXTURES)
def any_dir(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def load(directory: str) -> Tokenizer:
    return Tokenizer.from_file(f"{directory}/tokenizer.json")


def copy_with(directory: str, target: Path, *, tokenizer=None, config=None) -> str:
    """Copy a tokenizer directory, changing some entries of its JSON files."""
    shutil.copytree(directory, target)
    for name, changes in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        content = json.loads((target / name).read_text("utf-8"))
        content.update(changes or {})
        (target / name).write_text(json.dumps(content), "utf-8")
    return str(target)


# What a tokenizer is


def test_prefix_and_suffix_are_what_the_tokenizer_puts_around_a_probe(any_dir):
    spec, _ = load_spec(any_dir)
    tokenizer = load(any_dir)
    inner = tokenizer.encode("a b", add_special_tokens=False).ids
    whole = tokenizer.encode("a b", add_special_tokens=True).ids
    assert [*spec.prefix_ids, *inner, *spec.suffix_ids] == whole


@pytest.mark.parametrize(
    "processor",
    [
        processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
        processors.BertProcessing(("</s>", 1), ("<s>", 0)),
        processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing(
                    single="<s> <pad> $A </s> <s>", special_tokens=[("<s>", 0), ("</s>", 1), ("<pad>", 2)]
                ),
            ]
        ),
    ],
    ids=["roberta", "bert", "sequence"],
)
def test_every_post_processor_is_read_as_the_library_runs_it(tokenizer_dir, tmp_path, processor):
    tokenizer = load(tokenizer_dir)
    tokenizer.post_processor = processor
    shutil.copytree(tokenizer_dir, tmp_path / "t")
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    spec, _ = load_spec(str(tmp_path / "t"))
    inner = tokenizer.encode("a", add_special_tokens=False).ids
    assert [*spec.prefix_ids, *inner, *spec.suffix_ids] == tokenizer.encode("a").ids
    assert spec.prefix_ids


def test_the_add_bos_flag_overrules_the_post_processor(bos_tokenizer_dir, tokenizer_dir, tmp_path):
    without = copy_with(bos_tokenizer_dir, tmp_path / "a", config={"add_bos_token": False})
    assert load_spec(bos_tokenizer_dir)[0].prefix_ids == (1,)
    assert load_spec(without)[0].prefix_ids == ()
    added = copy_with(tokenizer_dir, tmp_path / "b", config={"add_bos_token": True, "add_eos_token": True})
    assert load_spec(added)[0].prefix_ids == (0,)
    assert load_spec(added)[0].suffix_ids == (1,)


def test_ids_and_sizes_are_those_of_the_library(any_dir):
    spec, files = load_spec(any_dir)
    vocabulary = load(any_dir).get_vocab(with_added_tokens=True)
    assert spec.vocab_size == len(vocabulary)
    assert spec.max_id == max(vocabulary.values())
    assert spec.eos_id == vocabulary["</s>"]
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert json.loads(json.dumps(spec.as_plan())) == spec.as_plan()


def test_added_tokens_beyond_the_base_vocabulary_raise_the_largest_id(tokenizer_dir, tmp_path):
    tokenizer = load(tokenizer_dir)
    tokenizer.add_tokens(["<|tool|>"])
    shutil.copytree(tokenizer_dir, tmp_path / "t")
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    assert load_spec(str(tmp_path / "t"))[0].max_id == load_spec(tokenizer_dir)[0].max_id + 1


def test_the_digest_ignores_what_does_not_change_ids(tokenizer_dir, tmp_path):
    digest = load_spec(tokenizer_dir)[0].digest
    used = load(tokenizer_dir)
    used.enable_padding(length=7)
    used.enable_truncation(3)
    used.encode("use it")
    shutil.copytree(tokenizer_dir, tmp_path / "used")
    used.save(str(tmp_path / "used" / "tokenizer.json"))
    assert load_spec(str(tmp_path / "used"))[0].digest == digest
    renamed = copy_with(tokenizer_dir, tmp_path / "renamed", config={"model_max_length": 9, "name_or_path": "x"})
    assert load_spec(renamed)[0].digest == digest


def test_a_tokenizer_saved_again_by_transformers_keeps_its_digest(tokenizer_dir, tmp_path):
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "again")
    spec, files = load_spec(str(tmp_path / "again"))
    assert spec.digest == load_spec(tokenizer_dir)[0].digest
    assert "chat_template.jinja" in files


@pytest.mark.parametrize(
    "config",
    [{"chat_template": "{{ messages }}"}, {"eos_token": "<pad>"}, {"pad_token": None}, {"add_bos_token": True}],
)
def test_the_digest_covers_template_and_special_ids(tokenizer_dir, tmp_path, config):
    changed = copy_with(tokenizer_dir, tmp_path / "t", config=config)
    assert load_spec(changed)[0].digest != load_spec(tokenizer_dir)[0].digest


def test_two_vocabularies_of_one_class_have_two_digests(tokenizer_dir, other_tokenizer_dir):
    assert load_spec(tokenizer_dir)[0].digest != load_spec(other_tokenizer_dir)[0].digest


def test_reading_a_spec_from_files_equals_reading_the_directory(tokenizer_dir):
    spec, files = load_spec(tokenizer_dir)
    assert spec_from_files(files) == spec
    assert Encoder(files).encode(["a b"])[0].tolist() == Encoder(tokenizer_dir).encode(["a b"])[0].tolist()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json: not JSON"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: no model with a vocabulary"),
        ({"tokenizer.json": "[1]"}, "tokenizer.json: no model with a vocabulary"),
        ({"tokenizer_config.json": "nope"}, "tokenizer_config.json: not a JSON object"),
        ({"tokenizer_config.json": '{"eos_token": "<nowhere>"}'}, "eos_token is '<nowhere>'"),
    ],
)
def test_a_broken_tokenizer_file_is_named(tokenizer_dir, tmp_path, files, message):
    target = shutil.copytree(tokenizer_dir, tmp_path / "t")
    for name, content in files.items():
        (target / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_spec(str(target))
    assert "\n" not in str(caught.value)


def test_a_model_that_the_library_cannot_load_is_an_error_of_ours(tokenizer_dir, tmp_path):
    target = copy_with(
        tokenizer_dir,
        tmp_path / "t",
        tokenizer={"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}},
        config={"bos_token": None, "eos_token": None, "pad_token": None},
    )
    with pytest.raises(TokenizerError, match=r"expected a tokenizer\.json that `tokenizers` can load"):
        Encoder(target)


def test_without_a_network_one_line_of_ours_stands_for_all_of_the_hub_client(monkeypatch, caplog):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_: Any, **__: Any) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise LocalEntryNotFoundError("cannot be reached")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(TokenizerError, match=r"no directory here, .* \(cannot be reached\).*or give a directory"):
        load_spec("nobody/nothing")
    assert not caplog.records
    with pytest.raises(LocalEntryNotFoundError):
        unreachable()
    assert caplog.records  # of others' calls nothing is hidden


def test_an_unknown_tokenizer_is_named(tmp_path, monkeypatch):
    import huggingface_hub.constants

    with pytest.raises(TokenizerError, match=r"no directory '\./nowhere'"):
        load_spec("./nowhere")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        TokenizerError, match="'nobody/nothing' is no directory here, and the hub gave no tokenizer"
    ) as caught:
        load_spec("nobody/nothing")
    assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        load_spec(str(tmp_path / "empty"))


def test_a_tokenizer_without_tokenizer_json_is_converted_by_transformers(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    spec, files = load_spec(str(tmp_path))
    assert (spec.prefix_ids, spec.suffix_ids, spec.pad_id) == ((2,), (3,), 0)
    ids, _ = Encoder(files).encode(["Hello worlds"])
    assert ids.tolist() == [5, 6, 7]


# Control text


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


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_that_is_a_program_is_refused_unread(tmp_path, file):
    (tmp_path / file).write_text(json.dumps({"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "model_type": "x"}))
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(TokenizerError, match=rf"brings code of its own \(auto_map in {file}\) and no tokenizer\.json"):
        load_spec(str(tmp_path))


def test_a_model_with_code_of_its_own_may_have_a_plain_tokenizer(tokenizer_dir, tmp_path):
    directory = shutil.copytree(tokenizer_dir, tmp_path / "t")
    (directory / "config.json").write_text(json.dumps({"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}))
    assert load_spec(str(directory))[0] == load_spec(tokenizer_dir)[0]


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
