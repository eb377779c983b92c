"""`pack bench` as a person runs it: on text, on the exercise of the preset, on the demo's corpus."""

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from trainer import demo_corpus

WIKITEXT = Path(__file__).parents[4] / "shared" / "data" / "wikitext2_valid.jsonl"  # beside a working copy, if anywhere


def pack_bench(*arguments, code=0):
    result = CliRunner().invoke(main, ["bench", *arguments, "--device", "cpu"])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def wikitext(tmp_path):
    """Articles of WikiText-2, or text of like lengths where it is not at hand."""
    if WIKITEXT.exists():
        return str(WIKITEXT)
    rng = random.Random(0)
    words = ["the", "of", "and", "lobster", "in", "=", ",", ".", "was", "@-@", "European"]
    with (tmp_path / "wikitext.jsonl").open("w") as file:
        for _ in range(60):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=int(rng.lognormvariate(5, 1))))}) + "\n")
    return str(tmp_path / "wikitext.jsonl")


@pytest.fixture
def gpt2(tmp_path):
    """The shape of distilgpt2, tiny; its vocabulary holds every id of `tokenizer_dir`."""
    path = tmp_path / "gpt2.json"
    config = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
    path.write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": 2}))
    return str(path)


def test_the_preset_runs_on_local_data_and_model(wikitext, gpt2, tokenizer_dir, tmp_path):
    page = tmp_path / "bench.html"
    result = pack_bench(
        "--preset", "distilgpt2-wikitext2", wikitext, "--model", gpt2, "--tokenizer", tokenizer_dir, "--steps", "1",
        "--batch", "2", "--json", "--html", str(page),
    )  # fmt: skip
    figures = json.loads(result.stdout)
    assert figures["settings"]["seq_len"] == 512
    assert figures["steps"]["documents"] >= 6
    names = [row["strategy"] for row in figures["rows"]]
    assert names == [
        "padded-max", "padded-longest", "length-bucketed", "packed-dense", "packed-varlen (cpu)",
    ]  # fmt: skip
    assert figures["disagreements"] == {}
    assert not [row for row in figures["rows"] if "failed" in row]
    assert all(name in page.read_text() for name in names)


def test_without_arguments_it_takes_the_demos_corpus_and_model(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # a narrow terminal shows fewer columns
    monkeypatch.setattr(
        demo_corpus,
        "read_library",
        lambda: [(f"{k}.py", f'"""Module {k}.{" One more word." * (k % 9)}"""') for k in range(200)],
    )
    monkeypatch.setattr(demo_corpus, "VOCAB_SIZE", 400)
    monkeypatch.setattr(
        demo_corpus, "MODEL", demo_corpus.MODEL | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    )
    result = pack_bench("--steps", "1", "--batch", "2", "--strategies", "padded-longest,packed-varlen")
    lines = result.stdout.splitlines()
    assert lines[1].split()[:2] == ["strategy", "tokens/step"]
    assert [line.split()[0] for line in lines[2:4]] == ["padded-longest", "packed-varlen"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "fast"], "--strategies: 'fast'; expected some of padded-max"),
        (["--model", "model.json"], "so its text needs a tokenizer. Add --tokenizer"),
        ([], "Add --tokenizer"),
        (["--html", "nowhere/bench.html"], "--html nowhere/bench.html: there is no such directory"),
    ],
)
def test_what_is_missing_is_one_line(wikitext, gpt2, tokenizer_dir, arguments, message):
    more = ["--tokenizer", tokenizer_dir, "--model", gpt2] if arguments and arguments[0] == "--strategies" else []
    result = pack_bench(wikitext, *arguments, *more, code=1)
    assert message in result.stderr.splitlines()[-1]
