"""Samples of a run: what transformers writes with the same weights, and nothing of the training changes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeline import BuildConfig, RecordOptions, build
from pipeline.report.html import render_page
from pipeline.report.runs import read_run, runs_page
from shards import Dataset, PackError
from trainer import TrainConfig, train
from trainer.samples import Sampler, continue_prompts

PROMPTS = ["7: the quick brown", "fox", "3: lazy dogs while packing puts documents jumps?"]
SETTINGS = {
    "dtype": "fp32", "lr": 1e-2, "schedule": "constant", "packs_per_step": 4, "log_every": 1, "device": "cpu",
    "steps": 6, "progress": False,
}  # fmt: skip


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n\n")
    return file


@pytest.fixture
def start(packed, llama, tmp_path):
    """Train for six steps; return the lines of metrics that have a field."""

    def run(name: str = "run", field: str = "samples", **fields) -> dict[int, list]:
        train(TrainConfig(dataset=packed, model=llama, out=tmp_path / name, **SETTINGS, **fields))
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line[field] for line in lines if field in line}

    return run


def greedy(model_dir: Path, prompt: str, tokens: int) -> str:
    """What transformers writes, with its own cache and masks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    ends = model.generation_config.eos_token_id
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )[0, ids.shape[1] :].tolist()
    for end in [ends] if isinstance(ends, int) else ends or []:
        written = written[: written.index(end)] if end in written else written
    return tokenizer.decode(written, skip_special_tokens=False)


@pytest.mark.parametrize("fields", [{}, {"lora_rank": 2}])
def test_the_last_samples_are_what_transformers_writes_with_the_exported_model(start, prompts, tmp_path, fields):
    samples = start(sample=prompts, sample_tokens=30, **fields)
    assert sorted(samples) == [6]
    expected = [{"prompt": text, "text": greedy(tmp_path / "run" / "model", text, 30)} for text in PROMPTS]
    assert samples[6] == expected
    assert all(sample["text"] for sample in expected)


def test_a_bucketed_dataset_is_sampled_alike(packed, llama, tmp_path, prompts, tokenizer_dir):
    source = Path(packed).parent / "questions.jsonl"
    out = tmp_path / "bucketed"
    kind = RecordOptions(kind="instruction")
    build(
        BuildConfig(
            sources=(str(source),), out=out, tokenizer=tokenizer_dir, seq_len=128, packer="bucketed", records=kind
        )
    )
    train(TrainConfig(dataset=out, model=llama, out=tmp_path / "run", sample=prompts, sample_tokens=20, **SETTINGS))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    expected = [greedy(tmp_path / "run" / "model", text, 20) for text in PROMPTS]
    assert [sample["text"] for sample in last["samples"]] == expected


def test_samples_come_when_asked_for_and_change_no_loss(start, prompts, tmp_path):
    plain = start("plain", "loss")
    samples = start(sample=prompts, sample_every=2, sample_tokens=5, tensorboard=True)
    assert sorted(samples) == [2, 4, 6]
    assert start("again", "loss", sample=prompts, sample_every=1, sample_tokens=5) == plain
    page = runs_page([read_run(str(tmp_path / "run"))])
    (table,) = page.sections[-1].tables
    assert [row[:2] for row in table.rows[:3]] == [[str(step), PROMPTS[2]] for step in (2, 4, 6)]
    assert len(table.rows) == 9
    assert "packing puts documents" in render_page(page)
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"sample/3" in events.read_bytes()


@pytest.mark.parametrize("shard", ["none", "full"])
def test_several_processes_write_the_same_samples(packed, llama, tmp_path, prompts, run_training, shard):
    job = {"dataset": packed, "model": llama, "sample": str(prompts), "sample_every": 3, "sample_tokens": 8}
    assert run_training([{**SETTINGS, **job, "out": str(tmp_path / "one")}]) == [0]
    assert run_training([{**SETTINGS, **job, "out": str(tmp_path / "two"), "shard": shard}], world_size=2) == [0, 0]
    one, two = (
        [line for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines() if "samples" in line]
        for name in ("one", "two")
    )
    assert one == two
    assert len(one) == 2


class Successor(nn.Module):
    """After token t the likeliest is t + 1."""

    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    backend = "cpu"

    def forward(self, batch):
        return nn.functional.one_hot(batch["input_ids"].flatten()[batch["logits_at"]] + 1, 512).float()


def test_every_prompt_of_a_row_goes_on_by_itself():
    written = continue_prompts(Successor(), [[5], [9, 20, 30], [7, 8]], 3, torch.device("cpu"))
    assert written.tolist() == [[6, 7, 8], [31, 32, 33], [9, 10, 11]]


def test_a_sample_ends_before_the_end_mark_of_the_model(packed, prompts):
    dataset = Dataset(packed)
    sampler = Sampler(prompts, dataset, tokens=6, tokens_per_batch=128)
    last = sampler.prompts[1].ids[-1]
    lm = Successor()
    lm.model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[last + 3]))
    samples = sampler.sample(lm, lm, torch.device("cpu"), torch.no_grad)
    assert samples[1]["text"] == sampler._tokenizer.decode([last + 1, last + 2], skip_special_tokens=False)


def test_messages_are_rendered_as_the_template_asks_for_an_answer(packed, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi\u2028you"}]}) + '\n{"prompt": "fox"}\n')
    chat, plain = Sampler(file, Dataset(packed), tokens=6, tokens_per_batch=128).prompts
    assert chat.text == "<|im_start|>user\nhi\u2028you<|im_end|>\n<|im_start|>assistant\n"
    assert chat.ids[0] == 3  # <|im_start|> as one token
    assert plain.text == "fox"


def test_a_text_begins_as_the_documents_of_the_dataset_do(tmp_path, bos_tokenizer_dir, prompts):
    (tmp_path / "text.jsonl").write_text('{"text": "the quick brown fox"}\n' * 9)
    config = BuildConfig(
        sources=(str(tmp_path / "text.jsonl"),), out=tmp_path / "bos", tokenizer=bos_tokenizer_dir, seq_len=64
    )
    build(config)
    dataset = Dataset(tmp_path / "bos")
    first = dataset.pack(0).input_ids[0]
    for prompt in Sampler(prompts, dataset, tokens=6, tokens_per_batch=64).prompts:
        assert prompt.ids[0] == first == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, r"`sample`: .*gone.txt cannot be read \(No such file or directory\); expected a file"),
        ("empty.txt", "\n \n", "`sample`: .*empty.txt is empty; expected a prompt in each line"),
        ("long.txt", "fox\n" + "fox " * 200, r"long.txt, line 2: the prompt has \d+ tokens; expected 1 to 64"),
        ("wrong.jsonl", "fox\n", r"wrong.jsonl, line 1: is not JSON"),
        ("half.jsonl", '{"prompt": "\\ud800x"}\n', r"half.jsonl, line 1: is not JSON"),
        ("deep.jsonl", "[" * 100_000, r"deep.jsonl, line 1: is not JSON"),
        ("other.jsonl", '{"text": "fox"}\n', 'other.jsonl, line 1: has neither a "prompt" that is text nor a list of'),
        ("list.jsonl", "[1]\n", "list.jsonl, line 1: has neither"),
        ("chat.jsonl", '{"messages": [1]}\n', "chat.jsonl, line 1: the chat template does not take these messages"),
    ],
)
def test_prompts_that_cannot_be_used_are_named_before_training(start, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(PackError, match=message):
        start(sample=tmp_path / name)
    assert not (tmp_path / "run" / "train.json").exists()


def test_sample_every_without_prompts_is_refused():
    with pytest.raises(
        PackError, match=r"`sample_every`: there are no prompts; expected a file of them\. Add `sample`"
    ):
        TrainConfig(dataset="d", model="m", out="o", sample_every=3)
