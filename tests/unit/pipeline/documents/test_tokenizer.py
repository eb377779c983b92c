"""Tokenizers: what their files say, against transformers and the tokenizers library."""

import json
import logging
import shutil
from typing import Any

import pytest
from tokenizer_dirs import copy_with, load
from tokenizers import processors

from pipeline.documents.encoder import Encoder
from pipeline.documents.tokenizer import load_spec, spec_from_files
from shards.errors import TokenizerError


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
