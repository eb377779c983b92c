"""Conversations through whole builds: what a dataset says of the template and the end marks that it was made with."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from click.testing import CliRunner

from pipeline import BuildConfig, build
from pipeline.building.audit import audit_sources
from pipeline.building.repacking.repack import repack
from pipeline.building.window import read_documents
from pipeline.cli import main
from pipeline.config import RecordOptions, RepackConfig
from pipeline.documents.encoder import Encoder
from pipeline.report.summary import summary_lines
from shards import Dataset, verify
from shards.errors import PackError

TEMPLATES = Path(__file__).parents[2] / "templates"
TALK = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four"}]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(20)))
    return str(path)


def made(corpus: str, tokenizer_dir: str, out: Path, seq_len: int = 64, **records) -> dict:
    options = RecordOptions(**{"kind": "chat", **records})
    return build(
        BuildConfig(sources=(corpus,), out=str(out), tokenizer=tokenizer_dir, seq_len=seq_len, records=options)
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


class TestUnrolled:
    """A template that rewrites earlier turns."""

    @pytest.fixture
    def unrolled(self, tokenizer_dir, tmp_path):
        talks = [TALK, [*TALK, {"role": "user", "content": "five"}, {"role": "assistant", "content": "six seven"}]]
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks * 10))
        text = (TEMPLATES / "thinking.jinja").read_text()
        return made(str(path), tokenizer_dir, tmp_path / "out", chat_template=text), str(path), tmp_path / "out"

    def test_the_balance_counts_conversations_answers_and_documents(self, unrolled, tokenizer_dir):
        manifest, _, path = unrolled
        assert manifest["totals"]["documents"]["read"] == 10 * (1 + 2)
        assert manifest["totals"]["documents"]["packed"] == 10 * (1 + 2)
        lengths: dict[tuple[int, int], int] = {}
        for pack in Dataset(path):
            for length, *document in zip(np.diff(pack["cu_seqlens"]), pack["doc_ids"], pack["doc_parts"], strict=True):
                lengths[tuple(map(int, document))] = lengths.get(tuple(map(int, document)), 0) + int(length)
        first_end, second_end = len(TALK) - 1, len(TALK) + 1  # places of the answers that documents end with
        parts = {record: (first_end, second_end) if record % 2 else (0,) for record in range(20)}
        assert set(lengths) == {(record, part) for record, found in parts.items() for part in found}
        second = [lengths[record, second_end] for record in range(1, 20, 2)]
        facts = {"conversations": 10, "turns": 20, "documents": 20, "tokens_once": sum(second)}
        facts["tokens"] = sum(second) + sum(lengths[record, first_end] for record in range(1, 20, 2))
        assert manifest["facts"]["unrolled"] == facts

    def test_it_verifies_and_holds_its_source(self, unrolled):
        _, source, path = unrolled
        assert verify(path, level="full").ok
        report = verify(path)
        audit_sources(str(path), (source,), report)
        assert report.ok, report.problems

    def test_a_document_is_shown_with_the_message_that_it_ends_with(self, unrolled):
        _, _, path = unrolled
        result = CliRunner().invoke(main, ["show", str(path), "--doc", "0:1"])
        assert result.exit_code == 0, result.output
        assert f", to its message {len(TALK)}" in result.output
        assert f", to its message {len(TALK) + 2}" in result.output

    def test_the_summary_says_what_it_costs(self, unrolled):
        manifest, _, path = unrolled
        line = next(line for line in summary_lines(manifest, str(path)) if line.startswith("unrolled"))
        assert "10 conversations with 20 trained answers became 20 documents" in line


def test_fields_that_nobody_reads_are_named_everywhere_and_refused_on_demand(tokenizer_dir, tmp_path):
    path = tmp_path / "chats.jsonl"
    records = [
        {"messages": TALK, "images": ["a.png"]},
        {"messages": TALK},
        {"messages": [TALK[0] | {"mask": 1}, TALK[1]]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    manifest = made(str(path), tokenizer_dir, tmp_path / "out")
    assert list(manifest["facts"]["unread_fields"].values()) == [{"images": 1, "message.mask": 1}]
    words = "no option reads 'images' (1 record), 'message.mask' (1 record)"
    assert any(words in line for line in summary_lines(manifest, "out"))
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")], env={"COLUMNS": "300"}).output
    assert words in " ".join(shown.split())
    plan = ["plan", str(path), "--tokenizer", tokenizer_dir, "--messages-field", "messages", "--seconds", "1"]
    assert words in " ".join(CliRunner().invoke(main, plan, env={"COLUMNS": "300"}).output.split())
    with pytest.raises(PackError, match="line 1: holds 'images', which no option reads"):
        made(str(path), tokenizer_dir, tmp_path / "strict", strict_fields=True)


def test_weights_lie_in_every_shard_and_none_is_lost(tokenizer_dir, tmp_path):
    """With documents that fit, the sum is that of the messages."""
    path = tmp_path / "chats.jsonl"
    weights = [0.25, 0.5, 1, 2, 0] * 8
    records = [{"messages": [TALK[0], TALK[1] | {"weight": weight}]} for weight in weights]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    manifest = made(str(path), tokenizer_dir, tmp_path / "out", message_weights=True)
    report = verify(tmp_path / "out", level="full")
    audit_sources(str(tmp_path / "out"), (str(path),), report)
    assert report.ok, report.problems
    dataset = Dataset(tmp_path / "out")
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert [row["loss_weights"] for row in loaded] == [pack["loss_weights"].tolist() for pack in dataset]
    answer = manifest["totals"]["targets"]["packed"] / 32  # trained tokens of each of the 32 answers that are
    assert float(dataset.index.weight_sum.sum()) == answer * sum(weights)
    assert {float(weight) for pack in dataset for weight in pack["loss_weights"]} == {0, 0.25, 0.5, 1, 2}
    assert manifest["totals"]["documents"]["dropped"] == {"no_target": 8}


def test_weights_that_cuts_hid_come_back_when_documents_are_joined(tokenizer_dir, tmp_path):
    path = tmp_path / "chats.jsonl"
    records = [{"messages": [TALK[0], TALK[1] | {"weight": weight}]} for weight in (0.25, 0.5, 2) * 4]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"message_weights": True, "overlong": "split"}
    made(str(path), tokenizer_dir, tmp_path / "whole", **options)
    made(str(path), tokenizer_dir, tmp_path / "cut", seq_len=9, **options)
    hidden = np.concatenate([pack["start_weights"] for pack in Dataset(tmp_path / "cut")])
    assert {*hidden.tolist()} == {0, 0.25, 0.5, 2}
    report = verify(tmp_path / "cut", level="full")
    audit_sources(str(tmp_path / "cut"), (str(path),), report)
    assert report.ok, report.problems
    repack(RepackConfig(dataset=tmp_path / "cut", out=tmp_path / "again", seq_len=64))
    for before, after in zip(Dataset(tmp_path / "whole"), Dataset(tmp_path / "again"), strict=True):
        assert before["loss_weights"].tolist() == after["loss_weights"].tolist()


def test_other_weights_than_the_sources_give_are_found(tokenizer_dir, tmp_path, monkeypatch):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}) + "\n")
    made(str(path), tokenizer_dir, tmp_path / "out", message_weights=True)

    def doubled(*arguments):
        documents, dropped = read_documents(*arguments)
        return documents._replace(loss_weights=documents.loss_weights * 2), dropped

    monkeypatch.setattr("pipeline.building.audit.read_documents", doubled)
    report = verify(tmp_path / "out", level="full")
    audit_sources(str(tmp_path / "out"), (str(path),), report)
    assert "has other loss weights in 0:" in report.problems[0].message
