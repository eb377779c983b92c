"""Conversations through whole builds: what a dataset says of the template and the end marks that it was made with."""

import json
from pathlib import Path

import pytest

from pipeline import BuildConfig, build
from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder

TEMPLATES = Path(__file__).parents[2] / "templates"
TALK = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four"}]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(20)))
    return str(path)


def made(corpus: str, tokenizer_dir: str, out: Path, **records) -> dict:
    options = RecordOptions(**{"kind": "chat", **records})
    return build(
        BuildConfig(sources=(corpus,), out=str(out), tokenizer=tokenizer_dir, seq_len=64, records=options)
    ).manifest


def test_the_template_that_rendered_the_rows_lies_in_the_dataset(corpus, tokenizer_dir, tmp_path):
    """hiyouga/LlamaFactory#7785: trained with one template, exported with another"""
    from transformers import AutoTokenizer

    text = (TEMPLATES / "no_marks.jinja").read_text()
    made(corpus, tokenizer_dir, tmp_path / "out", chat_template=text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == "User: one two\nAssistant: three four\n"


def test_the_tokenizers_own_template_stays_where_nobody_gave_another(corpus, tokenizer_dir, tmp_path):
    made(corpus, tokenizer_dir, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / "tokenizer" / name).read_bytes() == (Path(tokenizer_dir) / name).read_bytes()


@pytest.mark.parametrize(("template", "mark"), [("chatml", "<|im_end|>"), ("no_marks", "</s>")])
def test_the_end_mark_that_was_trained_is_named(corpus, tokenizer_dir, tmp_path, template, mark):
    """hiyouga/LlamaFactory#7454: a model that does not stop, since its configuration names another token"""
    spec = Encoder(tokenizer_dir).spec
    text = (TEMPLATES / f"{template}.jinja").read_text()
    manifest = made(corpus, tokenizer_dir, tmp_path / "out", chat_template=text)
    wanted = spec.eos_id if mark == "</s>" else spec.added[mark]
    assert manifest["facts"]["trained_end_ids"] == [wanted]


def test_an_end_mark_that_nobody_trained_on_is_not_named(corpus, tokenizer_dir, tmp_path):
    text = (TEMPLATES / "chatml.jinja").read_text().replace("'<|im_end|>\\n'", "'\\n'")
    manifest = made(corpus, tokenizer_dir, tmp_path / "out", chat_template=text, add_eos=False)
    assert manifest["facts"]["trained_end_ids"] == []
