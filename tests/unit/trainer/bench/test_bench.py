"""`pack bench`: every strategy trains the same thing, counts are those of the corpus, and what cannot run says so."""

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.cli import main
from pipeline.report.feedings import FEEDINGS
from shards import Dataset, PackError
from trainer.bench import strategies
from trainer.bench import timing as measuring
from trainer.bench.config import BenchConfig
from trainer.bench.run import of_dataset, run_bench
from trainer.bench.strategies import STRATEGIES, BufferedStrategy, MicroBatch, Shape, cut_padded_longest
from trainer.bench.view import figures_table, make_page, print_result, remarks
from trainer.model import loading

NUM_DOCUMENTS, BATCH, STEPS = 60, 4, 5  # a step holds 3 padded batches: together all documents
OURS = ("padded-max", "padded-longest", "length-bucketed", "packed-dense", "packed-varlen")


@pytest.fixture
def corpus(documents, make_dataset):
    """Sixty documents, and the dataset of them."""
    made = documents(NUM_DOCUMENTS, 40)
    return made, make_dataset({"main": made}, 48)


def bench(dataset, model, **more):
    defaults = {"batch": BATCH, "steps": STEPS, "dtype": "fp32", "device": "cpu", "strategies": OURS}
    return run_bench(BenchConfig(**({"data": str(dataset.path), "model": model} | defaults | more)))


def loss_alone(documents, config_file):
    """Sum the loss of every document by itself, under transformers' own eager attention and loss."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**json.loads(Path(config_file).read_text()))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    total = targets = 0
    with torch.no_grad():
        for ids, mask in documents:
            labels = torch.tensor(ids).where(torch.tensor(mask).bool(), -100)
            total += float(model(torch.tensor([ids]), labels=labels[None], num_items_in_batch=1, use_cache=False).loss)
            targets += sum(mask)
    return total / targets


def test_all_strategies_train_the_same_thing_on_the_tokens_of_the_corpus(corpus, model_config, tmp_path, monkeypatch):
    made, dataset = corpus
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    processes = psutil.Process().children(recursive=True)
    result = bench(dataset, model_config(), strategies=OURS)

    rows = {row["strategy"]: row for row in result["rows"]}
    assert len(rows) == 5
    assert result["disagreements"] == {}
    assert len(set(rows["padded-longest"]["losses"])) == STEPS
    tokens = sum(len(ids) for ids, _ in made)
    assert result["steps"]["tokens"] == tokens
    assert result["steps"]["targets"] == sum(sum(mask) for _, mask in made)
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["padded-longest"]["losses"], rel=1e-5)
        assert row["tokens_per_step"] * STEPS == pytest.approx(tokens)
    assert rows["padded-max"]["padding"] == pytest.approx(1 - tokens / (NUM_DOCUMENTS * 48))
    assert rows["packed-varlen (cpu)"]["padding"] == 0
    assert 0 < rows["length-bucketed"]["padding"] < rows["padded-longest"]["padding"]
    assert rows["padded-longest"]["speedup"] == 1

    assert list((tmp_path / "tmp").iterdir()) == []  # nothing is left behind
    assert psutil.Process().children(recursive=True) == processes
    found = json.loads(json.dumps(result))
    assert [row[0] for row in figures_table(found, 80).rows] == list(rows)
    assert len(figures_table(found, 80).columns) < len(figures_table(found).columns)
    sections = make_page(found).sections
    assert [len(section.plots) for section in sections] == [3, 0]
    assert [row[0] for row in sections[1].tables[0].rows] == list(rows)


def test_a_sliding_window_is_kept_or_refused(corpus, model_config):
    result = bench(corpus[1], model_config("mistral-window"), steps=2, strategies=OURS)
    rows = {row["strategy"]: row for row in result["rows"]}
    assert "would drop the model's sliding window" in rows.pop("packed-dense")["failed"]
    assert len(rows) == 4
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["padded-longest"]["losses"], rel=1e-5)


def test_the_loss_is_that_of_the_documents_alone(documents, make_dataset, model_config):
    made, config = documents(24, 40), model_config()
    result = bench(make_dataset({"main": made}, 48), config, steps=1, batch=8)  # one step of all documents
    assert result["steps"]["documents"] == 24
    assert len(result["rows"]) == len(OURS)
    for row in result["rows"]:
        assert row["loss"] == pytest.approx(loss_alone(made, config), rel=1e-5)


def test_padding_and_buckets_stay_within_their_sizes(documents):
    rows = [
        (np.array(ids), np.arange(len(ids)), np.array(mask), np.array([0, len(ids)])) for ids, mask in documents(50, 40)
    ]
    sizes = strategies.Sizes(seq_len=48, batch=7, tokens_per_batch=144, longest=40)
    step = strategies.StepPacks([], rows)
    for cut in (strategies.cut_padded_max, cut_padded_longest, strategies.cut_length_bucketed):
        batches = cut(step, sizes)
        assert sorted(id(row) for batch in batches for row in batch.rows) == sorted(map(id, rows))
        for batch in batches:
            assert max(len(row[0]) for row in batch.rows) <= batch.shape.row_len <= 48
            if cut is not strategies.cut_length_bucketed:
                assert len(batch.rows) <= 7
            else:
                assert len(batch.rows) * batch.shape.row_len <= 144


def built(tokenizer_dir, tmp_path, *flags):
    """Build documents of 13 to 401 tokens at seq_len 128: those of more than 31 words are cut."""
    words = [3 + n % 98 for n in range(150)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in words))
    fixed = ["--tokenizer", tokenizer_dir, "--seq-len", "128", "--workers", "1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, ["build", str(tmp_path / "corpus.jsonl"), *fixed, *flags])
    assert done.exit_code == 0, done.output
    return Dataset(tmp_path / "out"), words


@pytest.mark.parametrize("packer", ["auto", "wrapped"])
def test_parts_of_cut_documents_are_not_taken_for_documents(tokenizer_dir, tmp_path, packer):
    dataset, words = built(tokenizer_dir, tmp_path, "--packer", packer)
    found = of_dataset(dataset, BenchConfig(batch=4, steps=2))
    lengths = {4 * n + 1 for n in words if 4 * n + 1 < 128}
    assert {len(segment.input_ids) for segment in found.segments} <= lengths
    assert len(found.segments) > 20
    taken = re.match(r"([\d,]+) parts of cut documents were left out", found.notes[0])
    assert len(found.segments) + int(taken[1].replace(",", "")) == int(dataset.index.num_segments.sum())


def test_a_dataset_of_parts_alone_is_measured_all_the_same(tokenizer_dir, tmp_path):
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "word " * 3000}) + "\n")
    fixed = ["--tokenizer", tokenizer_dir, "--seq-len", "64", "--workers", "1", "--out", str(tmp_path / "out")]
    CliRunner().invoke(main, ["build", str(tmp_path / "corpus.jsonl"), *fixed])
    found = of_dataset(Dataset(tmp_path / "out"), BenchConfig(batch=4, steps=2))
    assert len(found.segments) == -(-12001 // 64)


def test_documents_that_fill_whole_rows_are_noted(make_dataset, model_config):
    whole = [([5] * 48, [0] + [1] * 47)] * 30
    result = bench(make_dataset({"main": whole}, 48), model_config(), strategies=("packed-varlen",))
    held = result["steps"]["documents"]
    assert any(note.startswith(f"{held} of {held} documents are 48 tokens long") for note in result["notes"])


class Greedy(BufferedStrategy):
    """Asks for more memory than there is."""

    def loss(self, batch, divisor):
        return torch.empty(1 << 60)


def test_running_out_of_memory_is_a_row(corpus, model_config, monkeypatch, capsys):
    def greedy(name, loaded, sizes, dtype):
        made = next(STRATEGIES["packed-varlen"](name, loaded, sizes, dtype))
        yield Greedy(name, loaded, made.cut, backend="cpu")

    monkeypatch.setitem(STRATEGIES, "greedy", greedy)
    result = bench(corpus[1], model_config(), steps=1, strategies=("padded-longest", "greedy", "packed-varlen"))
    assert [row.get("failed") for row in result["rows"]] == [None, "out of memory", None]
    assert result["disagreements"] == {}
    print_result(result)
    assert "greedy: out of memory" in capsys.readouterr().out


def test_another_fault_is_not_taken_for_memory(corpus, model_config, monkeypatch):
    monkeypatch.setattr(BufferedStrategy, "collate", lambda self, micro: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        bench(corpus[1], model_config(), strategies=("packed-varlen",))


@pytest.mark.parametrize("error", [RuntimeError("no kernel image\nsecond line"), ImportError("no kernel image")])
def test_a_strategy_that_fails_is_a_row_and_the_others_run(corpus, model_config, monkeypatch, error):
    class Broken(BufferedStrategy):
        def loss(self, batch, divisor):
            raise error

    def broken(name, loaded, sizes, dtype):
        made = next(STRATEGIES["packed-varlen"](name, loaded, sizes, dtype))
        yield Broken(name, loaded, made.cut, backend="cpu")

    def unloadable(name, loaded, sizes, dtype):
        raise error

    monkeypatch.setitem(STRATEGIES, "broken", broken)
    monkeypatch.setitem(STRATEGIES, "unloadable", unloadable)
    names = ("broken", "unloadable", "packed-varlen")
    result = bench(corpus[1], model_config(), steps=1, strategies=names)
    assert [row.get("failed") for row in result["rows"]] == [
        "failed: no kernel image", "not run: cannot be set up (no kernel image)", None
    ]  # fmt: skip


def test_a_strategy_that_leaks_is_shown_loudly(corpus, model_config, monkeypatch, capsys):
    def leaky(name, loaded, sizes, dtype):
        def cut(step):
            rows = [
                row._replace(cu_seqlens=row.cu_seqlens[[0, -1]]) for row in step.packs
            ]  # boundaries inside rows forgotten
            return [MicroBatch([row], Shape()) for row in rows]

        yield BufferedStrategy(name, loaded, cut, backend="cpu")

    monkeypatch.setitem(STRATEGIES, "leaky", leaky)
    result = bench(corpus[1], model_config(), steps=2, strategies=("padded-longest", "packed-varlen", "leaky"))
    assert list(result["disagreements"]) == ["leaky"]
    assert remarks(result)[0].startswith("LOSSES DISAGREE: leaky is up to ")
    print_result(result)
    out = capsys.readouterr().out
    assert "LOSSES DISAGREE" in out
    assert "≠" in next(line for line in out.splitlines() if line.startswith("leaky"))


def test_a_loss_that_is_no_number_disagrees():
    rows = [{"strategy": "a", "losses": [1.0, 2.0]}, {"strategy": "b", "losses": [1.0, float("nan")]}]
    assert list(measuring.disagreements(rows, 1e-5)) == ["b"]
    assert measuring.disagreements([rows[0], {"strategy": "c", "failed": "out of memory"}], 1e-5) == {}


def test_layers_that_run_one_document_a_row_are_packed_but_take_no_dense_mask(corpus, tmp_path):
    config = {"model_type": "bloom", "vocab_size": 97, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    (tmp_path / "bloom.json").write_text(json.dumps(config))
    result = bench(corpus[1], str(tmp_path / "bloom.json"), steps=1, strategies=OURS)
    failed = {row["strategy"]: row["failed"] for row in result["rows"] if "failed" in row}
    assert list(failed) == ["packed-dense"]
    assert "a dense mask says nothing" in failed["packed-dense"]
    rows = {row["strategy"]: row for row in result["rows"]}
    assert rows["packed-varlen"]["losses"] == pytest.approx(rows["padded-longest"]["losses"], rel=1e-5)
    assert result["disagreements"] == {}


def test_a_model_that_cannot_pack_is_still_padded(corpus, tmp_path, monkeypatch):
    config = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    (tmp_path / "gpt2.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 0}))
    monkeypatch.setattr(loading, "refusal", lambda config: "remembers other documents")
    result = bench(corpus[1], str(tmp_path / "gpt2.json"), steps=1, strategies=OURS)
    failed = {row["strategy"]: row["failed"] for row in result["rows"] if "failed" in row}
    assert failed == dict.fromkeys(("packed-dense", "packed-varlen"), "not run: the model remembers other documents")
    assert result["disagreements"] == {}


def test_a_learned_position_table_sets_the_limit(corpus, tmp_path):
    config = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
    (tmp_path / "gpt2.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 0}))
    result = bench(corpus[1], str(tmp_path / "gpt2.json"), steps=2)
    failed = {row["strategy"]: row["failed"] for row in result["rows"] if "failed" in row}
    assert failed == {"padded-max": "not run: rows of 48 tokens, the model has 40 positions"}
    assert result["disagreements"] == {}


def test_the_command_line_names_what_there_is():
    assert set(STRATEGIES) == set(FEEDINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "`batch`: 0; expected at least 1"),
        ({"strategies": ("padded", "packed-varlen")}, "`strategies`: 'padded'; expected some of padded-max"),
        ({"strategies": ()}, "`strategies`: none"),
        ({"dtype": "fp8"}, "`dtype`: 'fp8'"),
        ({"device": "tpu"}, "--device tpu: this torch sees no such device; it sees"),
        ({"seq_len": 64}, "is a dataset and has its own"),
        ({"tokens_per_batch": 20}, "--tokens-per-batch: 20; expected at least one pack of 48 tokens"),
        ({"batch": 100}, "60 documents; expected at least 300 for a step"),
    ],
)
def test_settings_that_do_not_fit_are_named(corpus, model_config, settings, message):
    with pytest.raises(PackError, match=message.replace("(", r"\(")):
        bench(corpus[1], model_config(), **settings)


@pytest.mark.parametrize("tokenizer", [None, "tokenizer"])
def test_a_path_that_leads_nowhere_is_said_before_a_tokenizer_is_asked_for(tmp_path, tokenizer):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(PackError, match=rf"{nowhere}: no such file or directory; expected .*\. Check the path\."):
        run_bench(BenchConfig(data=str(nowhere), tokenizer=tokenizer, device="cpu"))


def test_an_unfinished_dataset_is_not_taken_for_text(corpus, model_config):
    dataset = corpus[1]
    (dataset.path / "manifest.json").unlink()
    with pytest.raises(PackError, match=r"holds an unfinished build.*Finish it with pack build"):
        bench(dataset, model_config())
