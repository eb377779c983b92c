"""What is said of a template is what it does."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.config import RecordOptions
from pipeline.estimate.template_check import CASES, check_template

TEMPLATES = Path(__file__).parents[3] / "templates"


def check(tokenizer_dir: str, name: str, sources: tuple[str, ...] = ()):
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return check_template(tokenizer_dir, RecordOptions(kind="chat", chat_template=text), sources)


def cases(tokenizer_dir: str, name: str) -> dict[str, tuple[int, str]]:
    found = check(tokenizer_dir, name)["cases"]
    assert [case["name"] for case in found] == list(CASES)
    return {case["name"]: (case["documents"], case["note"]) for case in found}


def test_a_plain_template_keeps_everything_in_one_document(tokenizer_dir):
    found = cases(tokenizer_dir, "chatml")
    assert found["several answers"] == (1, "")
    assert found["system prompt"] == (1, "a turn of its own")
    assert found["white space around an answer"] == (1, "kept before and after")
    assert found["two tool calls at once"] == (1, "")
    assert found["reasoning"] == (0, "refused: the chat template leaves out reasoning_content of message 1 (assistant)")


def test_a_template_that_rewrites_history_is_named(tokenizer_dir):
    found = cases(tokenizer_dir, "qwen")
    assert found["several answers"] == (2, "rewrites earlier turns: unrolled")
    note = "rewrites earlier turns: unrolled; earlier reasoning is gone"
    assert found["reasoning in several answers"] == (2, note)


def test_one_that_merges_and_trims_is_named(tokenizer_dir):
    found = cases(tokenizer_dir, "gemma")
    assert found["system prompt"] == (1, "merged into the question")
    assert found["white space around an answer"] == (1, "trimmed")
    assert found["two questions in a row"][1].startswith(
        "refused: the chat template refuses it (Conversation roles must"
    )


@pytest.mark.parametrize(
    ("name", "traits"),
    [("marked", {"marks"}), ("closes", {"closes_with_eos"}), ("llama", {"prints_date"}), ("parts", {"content_parts"})],
)
def test_what_a_template_is_like_is_said(tokenizer_dir, name, traits):
    found = check(tokenizer_dir, name)
    named = {trait for trait in ("marks", "closes_with_eos", "prints_date", "content_parts") if found[trait]}
    assert named == traits


def test_the_trained_texts_are_the_answers_with_their_end_marks(tokenizer_dir):
    found = check(tokenizer_dir, "chatml")
    assert found["cases"][1]["trained"] == ["first answer<|im_end|>", "second answer<|im_end|>"]
    assert found["example"] == [
        "<|im_start|>user\nfirst question<|im_end|>\n<|im_start|>assistant\n⟦first answer<|im_end|>⟧\n"
        "<|im_start|>user\nsecond question<|im_end|>\n<|im_start|>assistant\n⟦second answer<|im_end|>⟧\n"
    ]


def test_a_corpus_is_counted_with_the_reasons(tokenizer_dir, tmp_path):
    ask, reply = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
    call = reply | {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    talks = [[ask, reply], [ask, reply, ask, reply], [ask, call], [ask, reply, ask, call]]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    found = check(tokenizer_dir, "thinking", (str(path),))["corpus"]
    assert (found["records"], found["taken"], found["documents"]) == (4, 2, 3)
    assert found["refused"] == {"the chat template leaves out tool_calls of message … (assistant)": 2}
    result = CliRunner().invoke(main, ["check-template", tokenizer_dir, str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "2 of 4 records taken" in result.output
    as_json = CliRunner().invoke(main, ["check-template", tokenizer_dir, "--json"])
    assert json.loads(as_json.stdout)["corpus"] is None
