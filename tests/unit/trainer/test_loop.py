"""Whole runs on tiny models: splits, precisions, adapters, evaluation, and runs that must stop."""

import dataclasses
import json
import math
import os
import shutil
import signal
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import trainer.loop
import trainer.saving.checkpoint
from shards import PackError
from trainer import TrainResult, load_model


def weights_of(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(result.model_dir / "model.safetensors")


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_any_split_into_micro_batches_gives_the_same_losses_and_gradients(run, weighting):
    runs = [run(f"{k}", tokens_per_batch=48 * k, loss_weighting=weighting)[1] for k in (1, 2, 4)]
    for key in ("loss", "grad_norm"):
        assert len(runs[0].column(key)) == 4
        assert runs[1].column(key) == pytest.approx(runs[0].column(key), rel=1e-5)
        assert runs[2].column(key) == pytest.approx(runs[0].column(key), rel=1e-5)


def test_the_first_loss_is_the_mean_over_the_targets_of_the_step(run, dataset, model_config):
    _, lines = run(loss_weighting="token")
    torch.manual_seed(0)
    model = load_model(model_config()).model.eval()
    from trainer.loader import PackLoader

    total, targets = 0.0, 0
    for pack in PackLoader(dataset, packs_per_step=4).packs_of(0):
        row = dataset.pack(int(pack))
        ids, mask, cu = row.input_ids, row.loss_mask, row.cu_seqlens
        for start, stop in pairwise(cu.tolist()):
            document = torch.from_numpy(ids[start:stop].astype("int64"))[None]
            model.set_attn_implementation("eager")
            logits = model(input_ids=document, use_cache=False).logits[0, :-1].log_softmax(-1)
            chosen = torch.from_numpy(mask[start:stop].astype(bool))[1:]
            total -= float(logits.gather(1, document[0, 1:, None])[chosen].sum().detach())
            targets += int(chosen.sum())
    assert lines[0]["targets"] == targets > 20
    assert lines[0]["loss"] == pytest.approx(total / targets, rel=1e-5)


def test_every_line_has_every_figure(run, dataset):
    _, lines = run(eval=str(dataset.path))
    for line in lines[:4]:
        assert line["tokens"] >= line["targets"] > 0
        assert line["tokens_per_s"] > 0
        assert 0 <= line["data_wait"] <= 1
        assert line["straggler"] == 1
        assert line["mfu"] is None
        assert line["tflops_per_s"] > 0
        assert line["memory_gib"] > 0
    assert lines.column("lr") == pytest.approx([1e-2 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)])
    assert lines[4]["eval_perplexity"] == pytest.approx(math.exp(lines[4]["eval_loss"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"activation_checkpointing": True},
        {"order": "cost-grouped", "last_step": "pad"},
        {"z_loss": 1e-3},
        {"freeze": ("model.embed_tokens.*",)},
        {"schedule": "wsd", "warmup_steps": 1, "clip": 0.0},
        {"steps": None, "epochs": 1.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_variants_learn(run, fields):
    result, lines = run(**fields)
    losses = lines.column("loss")
    assert result.steps == len(losses) >= 4
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


def test_recomputing_activations_changes_no_number(run):
    assert run("with", activation_checkpointing=True)[1].column("loss") == run("without")[1].column("loss")


def test_frozen_parameters_stay(run):
    frozen, free = (weights_of(run(name, freeze=f)[0]) for name, f in (("a", ("lm_head.*",)), ("b", ())))
    started = weights_of(run("c", lr=0.0)[0])
    assert torch.equal(frozen["lm_head.weight"], started["lm_head.weight"])
    assert not torch.equal(free["lm_head.weight"], started["lm_head.weight"])
    assert not torch.equal(frozen["model.embed_tokens.weight"], started["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", ["bf16", "bf16-pure"])
def test_bf16_runs_stay_near_fp32_and_export_bf16(run, dtype):
    result, lines = run("narrow", dtype=dtype)
    assert lines.column("loss") == pytest.approx(run("wide")[1].column("loss"), rel=0.02)
    assert {tensor.dtype for tensor in weights_of(result).values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_resume_and_merge_into_a_plain_model(run, dtype, tmp_path, dataset):
    fields = {"lora_rank": 2, "dtype": dtype, "schedule": "constant", "lr": 5e-2}
    _, whole = run("whole", **fields)
    run("parts", steps=2, **fields)
    shutil.rmtree(tmp_path / "parts" / "model")
    result, parts = run("parts", resume=True, **fields)
    assert parts.column("loss") == whole.column("loss")
    assert parts.column("loss")[-1] < parts.column("loss")[0]
    assert (tmp_path / "parts" / "adapter" / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    started = weights_of(run("start", lora_rank=2, dtype=dtype, lr=0.0)[0])
    moved = weights_of(result)
    changed = {name for name in moved if not torch.equal(moved[name], started[name])}
    assert changed == {name for name in moved if "proj" in name}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "muon", "adafactor"])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights(run, dataset, tmp_path, monkeypatch, optimizer):
    fields = {"schedule": "constant", "optimizer": optimizer}
    take_step = trainer.loop.take_step

    def poisoned(run, batches, interval):
        if run.step == 2:
            run.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
        return take_step(run, batches, interval)

    _, clean = run("clean", steps=2, **fields)
    monkeypatch.setattr(trainer.loop, "take_step", poisoned)
    with pytest.raises(PackError, match=r"step 3: the gradient is not finite.*not-finite\.json"):
        run("bad", **fields)
    monkeypatch.undo()
    report = json.loads((tmp_path / "bad" / "not-finite.json").read_text())
    assert report["step"] == 3
    assert len(report["documents_by_pack"]) == 4
    pack, documents = next(iter(report["documents_by_pack"].items()))
    assert documents == [f"window 0, record {i}" for i in dataset[int(pack)]["doc_ids"].tolist()]
    result, lines = run("bad", resume=True, **fields)  # and it goes on from just before
    assert lines.column("loss")[:2] == clean.column("loss")
    assert lines.column("loss") == run("whole", **fields)[1].column("loss")
    assert result.steps == 4


def test_evaluation_does_not_depend_on_packing(run, make_dataset, documents):
    eval_documents = documents(40, 60, seed=9)
    losses = []
    for packer, batch in (("ffd", 64), ("ffd", 256), ("bucketed", 128), ("unpacked", 64)):
        path = make_dataset({"main": eval_documents}, 64, packer, f"eval-{batch}").path
        packs = batch // 48
        _, lines = run(
            str(path.name), steps=1, lr=0.0, eval=str(path), tokens_per_batch=batch, packs_per_step=packs, force=True
        )
        losses.append(lines.column("eval_loss")[0])
        assert lines[-1]["eval_targets"] == sum(sum(mask) for _, mask in eval_documents)
    assert losses[1:] == pytest.approx(losses[:1] * 3, rel=1e-6)


def test_a_bucketed_dataset_trains_like_its_packed_twin(run, make_dataset, documents):
    """All documents in one step, as rectangles and as packs: the same loss and gradient."""
    texts = documents(24, 64, seed=4, shortest=33)  # one bucket: three rectangles of eight rows
    figures = []
    for packer, fields in (
        ("bucketed", {"tokens_per_batch": 512, "packs_per_step": 24}),
        ("unpacked", {"packs_per_step": 24}),
    ):
        data = make_dataset({"main": texts}, 64, packer)
        _, lines = run(packer, dataset=str(data.path), steps=2, force=True, **fields)
        figures.append([lines.column(key) for key in ("loss", "grad_norm", "targets")])
    assert figures[0] == [pytest.approx(values, rel=1e-5) for values in figures[1]]


def test_a_model_without_attention_trains_on_one_document_a_row(run, make_dataset, documents, tmp_path):
    data = make_dataset({"main": documents(40, 30)}, 48, "bucketed")
    config = {"model_type": "mamba", "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    (tmp_path / "mamba.json").write_text(json.dumps(config))
    result, lines = run("mamba", dataset=str(data.path), model=str(tmp_path / "mamba.json"), steps=1)
    assert result.steps == 1
    assert lines[0]["tflops_per_s"] > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo hides it, unless it is an error
def test_compiled_layers_are_few_graphs_and_the_same_losses(run, monkeypatch):
    def compile_without_code_generation(self: torch.nn.Module) -> None:
        self._compiled_call_impl = torch.compile(self._call_impl, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_without_code_generation)
    torch.compiler.reset()
    counts, take_step = [], trainer.loop.take_step

    def counting_step(*arguments):
        result = take_step(*arguments)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return result

    monkeypatch.setattr(trainer.loop, "take_step", counting_step)
    fields = {"tokens_per_batch": 96, "packs_per_step": 4, "steps": 8}
    _, compiled = run("compiled", compile=True, **fields)
    assert counts[0] > 0
    assert counts[-1] == counts[3]
    _, plain = run("plain", **fields)
    assert compiled.column("loss") == pytest.approx(plain.column("loss"), rel=1e-5)


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_a_line_over_several_steps_is_a_mean_over_targets_not_over_steps(run, weighting):
    """Steps of unlike numbers of targets: the mean of their means is another figure."""
    fields = {"packs_per_step": 1, "steps": 12, "lr": 0.5, "schedule": "constant", "loss_weighting": weighting}
    _, each = run("each", **fields)
    _, together = run("together", log_every=12, **fields)
    first, last = together
    weights = each.column("targets")
    assert len(set(weights)) > 3
    if weighting == "token":
        rest = sum(loss * n for loss, n in zip(each.column("loss")[1:], weights[1:], strict=True)) / sum(weights[1:])
        assert last["loss"] == pytest.approx(rest, rel=1e-5)
        assert last["loss"] != pytest.approx(sum(each.column("loss")[1:]) / 11, rel=1e-3)
    assert first["loss"] == pytest.approx(each.column("loss")[0], rel=1e-6)


def test_a_request_to_stop_looks_for_a_bad_gradient_before_it_saves(run, tmp_path, monkeypatch):
    """On a GPU that is not looked for at every step; weights and step number of the checkpoint must still agree."""
    take_step, looked = trainer.loop.take_step, []

    def stopping(run, *rest):
        if run.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        result = take_step(run, *rest)
        run.world = dataclasses.replace(run.world, device=torch.device("meta"))  # as on a GPU: not at every step
        return result

    monkeypatch.setattr(trainer.loop, "take_step", stopping)
    monkeypatch.setattr(trainer.loop, "stop_if_not_finite", lambda run: looked.append(run.step))
    monkeypatch.setattr(trainer.loop, "log", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        run(log_every=3, save_every=4)
    assert looked == [1, 2]
