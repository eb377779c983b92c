"""Whole runs on tiny models: splits, precisions, adapters, checkpoints, evaluation, and runs that must stop."""

import errno
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import trainer.checkpoint
import trainer.loop
from shards import PackError
from trainer import TrainConfig, Trained, train
from trainer.metrics import cost_of
from trainer.model.loading import load_model

SETTINGS = {
    "steps": 4, "packs_per_step": 4, "lr": 1e-2, "dtype": "fp32", "log_every": 1, "device": "cpu", "progress": False,
}  # fmt: skip


@pytest.fixture
def run(dataset, model_config, tmp_path):
    """Train on the small dataset and return the result and the lines of metrics; fields as in TrainConfig."""

    model = model_config()

    def start(name: str = "run", **fields) -> tuple[Trained, list[dict]]:
        chosen = {"dataset": str(dataset.path), "model": model, "out": str(tmp_path / name), **SETTINGS, **fields}
        result = train(TrainConfig(**chosen))
        return result, [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    return start


def column(lines: list[dict], key: str) -> list[float]:
    return [line[key] for line in lines if key in line]


def weights_of(result: Trained) -> dict[str, torch.Tensor]:
    return load_file(result.model_dir / "model.safetensors")


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_any_split_into_micro_batches_gives_the_same_losses_and_gradients(run, weighting):
    runs = [run(f"{k}", tokens_per_batch=48 * k, loss_weighting=weighting)[1] for k in (1, 2, 4)]
    for key in ("loss", "grad_norm"):
        assert len(column(runs[0], key)) == 4
        assert column(runs[1], key) == pytest.approx(column(runs[0], key), rel=1e-5)
        assert column(runs[2], key) == pytest.approx(column(runs[0], key), rel=1e-5)


def test_the_first_loss_is_the_mean_over_the_targets_of_the_step(run, dataset, model_config):
    _, lines = run(loss_weighting="token")
    torch.manual_seed(0)
    model = load_model(model_config()).model.eval()
    from trainer.loader import PackLoader

    total, targets = 0.0, 0
    for pack in PackLoader(dataset, packs_per_step=4).packs_of(0):
        ids, _, mask, cu = dataset.pack(int(pack))
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
    assert column(lines, "lr") == pytest.approx([1e-2 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)])
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
    losses = column(lines, "loss")
    assert result.steps == len(losses) >= 4
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


def test_recomputing_activations_changes_no_number(run):
    assert column(run("with", activation_checkpointing=True)[1], "loss") == column(run("without")[1], "loss")


def test_frozen_parameters_stay(run):
    frozen, free = (weights_of(run(name, freeze=f)[0]) for name, f in (("a", ("lm_head.*",)), ("b", ())))
    started = weights_of(run("c", lr=0.0)[0])
    assert torch.equal(frozen["lm_head.weight"], started["lm_head.weight"])
    assert not torch.equal(free["lm_head.weight"], started["lm_head.weight"])
    assert not torch.equal(frozen["model.embed_tokens.weight"], started["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", ["bf16", "bf16-pure"])
def test_bf16_runs_stay_near_fp32_and_export_bf16(run, dtype):
    result, lines = run("narrow", dtype=dtype)
    assert column(lines, "loss") == pytest.approx(column(run("wide")[1], "loss"), rel=0.02)
    assert {tensor.dtype for tensor in weights_of(result).values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_resume_and_merge_into_a_plain_model(run, dtype, tmp_path, dataset):
    fields = {"lora_rank": 2, "dtype": dtype, "schedule": "constant", "lr": 5e-2}
    _, whole = run("whole", **fields)
    run("parts", steps=2, **fields)
    shutil.rmtree(tmp_path / "parts" / "model")
    result, parts = run("parts", resume=True, **fields)
    assert column(parts, "loss") == column(whole, "loss")
    assert column(parts, "loss")[-1] < column(parts, "loss")[0]
    assert (tmp_path / "parts" / "adapter" / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    started = weights_of(run("start", lora_rank=2, dtype=dtype, lr=0.0)[0])
    moved = weights_of(result)
    changed = {name for name in moved if not torch.equal(moved[name], started[name])}
    assert changed == {name for name in moved if "proj" in name}


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights(run, dataset, tmp_path, monkeypatch):
    take_step = trainer.loop.take_step

    def poisoned(run, batches, window):
        if run.step == 2:
            run.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
        return take_step(run, batches, window)

    _, clean = run("clean", steps=2, schedule="constant")
    monkeypatch.setattr(trainer.loop, "take_step", poisoned)
    with pytest.raises(PackError, match=r"step 3: the gradient is not finite.*not-finite\.json"):
        run("bad", schedule="constant")
    monkeypatch.undo()
    report = json.loads((tmp_path / "bad" / "not-finite.json").read_text())
    assert report["step"] == 3
    assert len(report["documents_by_pack"]) == 4
    pack, documents = next(iter(report["documents_by_pack"].items()))
    assert documents == [f"window 0, record {i}" for i in dataset[int(pack)]["doc_ids"].tolist()]
    result, lines = run("bad", resume=True, schedule="constant")  # and it goes on from just before
    assert column(lines, "loss")[:2] == column(clean, "loss")
    assert column(lines, "loss") == column(run("whole", schedule="constant")[1], "loss")
    assert result.steps == 4


def test_the_last_checkpoints_and_the_best_are_kept(run, dataset, tmp_path):
    # a rate this high makes the loss worse from some step on
    _, lines = run(steps=8, lr=0.5, schedule="constant", save_every=1, keep=2, eval=str(dataset.path), eval_every=1)
    losses = column(lines, "eval_loss")
    best = losses.index(min(losses)) + 1
    assert best < 7, "the test needs a best step that would not be kept anyway"
    root = tmp_path / "run" / "checkpoints"
    assert (root / "best").resolve().name == f"step-{best:08d}"
    assert {path.name for path in root.iterdir()} == {"best", f"step-{best:08d}", "step-00000007", "step-00000008"}


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "seal"])
def test_a_damaged_checkpoint_is_skipped_with_a_message(run, tmp_path, damage, capsys):
    _, whole = run("whole", schedule="constant")
    run("hurt", steps=3, save_every=1, schedule="constant")
    newest = tmp_path / "hurt" / "checkpoints" / "step-00000003"
    file = next(newest.glob("*.distcp")) if damage != "seal" else newest / "checkpoint.json"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    if damage == "remove":
        file.unlink()
    _, lines = run("hurt", resume=True, schedule="constant")
    assert "this checkpoint is skipped" in capsys.readouterr().err
    assert column(lines, "loss") == column(whole, "loss")


def test_a_full_disk_is_one_line_and_the_run_goes_on_from_what_is_whole(run, monkeypatch):
    publish = trainer.checkpoint.Checkpoints._publish

    def fail_at_two(self, temporary, final, content, best):
        if content["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(self, temporary, final, content, best)

    monkeypatch.setattr(trainer.checkpoint.Checkpoints, "_publish", fail_at_two)
    with pytest.raises(PackError, match=r"cannot write a checkpoint \(No space left on device\).*--resume"):
        run("full", save_every=1)
    monkeypatch.undo()
    _, lines = run("full", resume=True, save_every=1)
    assert column(lines, "loss") == column(run("whole")[1], "loss")


def test_a_resumed_run_keeps_its_packs_per_step_and_says_what_it_leaves_out(run, capsys):
    run(steps=2)
    _, lines = run(resume=True, packs_per_step=None)
    assert column(lines, "tokens")[2] > 3 * 30  # still four packs
    assert "an epoch is" in capsys.readouterr().err


def test_resuming_an_empty_run_directory_starts_and_says_so(run, capsys, tmp_path):
    assert run("new", resume=True)[0].steps == 4
    assert f"--resume: there is no checkpoint in {tmp_path / 'new'}, so training starts" in capsys.readouterr().err


def test_other_settings_of_a_resumed_run_are_said_one_line_each(run, capsys):
    run(steps=2, schedule="constant", lr=1e-3)
    capsys.readouterr()
    run(resume=True, schedule="wsd", lr=5e-3, decay_steps=1, packs_per_step=None, log_every=2)
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("--resume")] == [
        "--resume: goes on after step 2 of 4",
        "--resume: --steps 2 before, 4 now",
        "--resume: --lr 0.001 before, 0.005 now",
        "--resume: --schedule constant before, wsd now",
        "--resume: --decay-steps not set before, 1 now",
    ]


@pytest.mark.parametrize("fields", [{}, {"lora_rank": 2}, {"dtype": "bf16", "freeze": ("*embed*",)}])
def test_nothing_on_disk_changes_where_nothing_is_left_to_train(run, tmp_path, fields):
    run(**fields)
    before = contents_of(tmp_path / "run")
    run(resume=True, lr=5e-3, schedule="constant", tensorboard=True, profile=True, **fields)
    assert contents_of(tmp_path / "run") == before
    assert not (tmp_path / "run" / "profile").exists()
    assert {"train.json", "README.md", "model.safetensors"} <= {path.name for path in before}


def test_a_run_that_died_before_its_model_was_written_gets_it_from_the_settings_that_trained_it(run, tmp_path):
    run()
    before = contents_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    run(resume=True, lr=5e-3)
    assert contents_of(tmp_path / "run") == before


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(run, tmp_path):
    run(save_every=2)
    for seal in (tmp_path / "run" / "checkpoints").glob("step-*/checkpoint.json"):
        seal.write_text("{")
    before = contents_of(tmp_path / "run")
    with pytest.raises(PackError, match=r"checkpoints: 2 checkpoints, none sound; .* choose another --out\.$"):
        run(resume=True)
    assert contents_of(tmp_path / "run") == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(run, tmp_path, finished):
    run(save_every=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    if not finished:
        shutil.rmtree(tmp_path / "run" / "model")
    before = contents_of(tmp_path / "run")
    with pytest.raises(PackError, match=r"checkpoints: the checkpoints of this run are gone; .* another --out\.$"):
        run(resume=True)
    assert contents_of(tmp_path / "run") == before


def test_a_run_that_died_before_its_first_checkpoint_starts_again(run, tmp_path, capsys):
    _, whole = run("whole", save_every=4)
    run(save_every=4)
    for name in ("checkpoints", "model"):
        shutil.rmtree(tmp_path / "run" / name)
    _, lines = run(resume=True, save_every=4)
    assert "so training starts from the first step" in capsys.readouterr().err
    assert column(lines, "loss") == column(whole, "loss")


def test_a_resumed_run_says_where_it_goes_on(run, capsys):
    run(steps=2)
    run(resume=True)
    assert "--resume: goes on after step 2 of 4\n" in capsys.readouterr().err
    run(resume=True)
    assert "--resume: all 4 steps are taken already; nothing is left to train\n" in capsys.readouterr().err


def test_resuming_behind_the_last_step_asked_for_is_refused_and_changes_nothing(run, tmp_path):
    run()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(PackError, match=r"run: has taken 4 steps already, this run asks for 3; nothing is left to do"):
        run(resume=True, steps=3)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert len(before) > 5


@pytest.mark.parametrize("fields", [{"mix": (("books", 1.0),)}, {"tokens_per_batch": 40}, {"packs_per_step": 10**6}])
def test_settings_that_do_not_fit_a_dataset_are_refused_before_a_model_is_loaded(run, monkeypatch, tmp_path, fields):
    monkeypatch.setattr("trainer.run.load_model", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    with pytest.raises(PackError, match="--" + next(iter(fields)).replace("_", "-")):
        run(**fields)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_is_refused(run):
    run(steps=2)
    with pytest.raises(PackError, match="--lora-rank 0, this run has 4"):
        run(resume=True, lora_rank=4)


def test_a_checkpoint_of_another_dtype_is_refused_and_changes_nothing(run, tmp_path):
    run(steps=2)
    before = contents_of(tmp_path / "run")
    with pytest.raises(PackError, match=r"was saved with --dtype 'fp32', this run has 'bf16'\. Resume with the same"):
        run(resume=True, dtype="bf16")
    assert contents_of(tmp_path / "run") == before


def test_adapters_are_not_resumed_under_another_scale(run):
    run(steps=2, lora_rank=2, lora_alpha=4)  # scaled by alpha / rank: other weights in effect
    with pytest.raises(PackError, match="was saved with --lora-alpha 4, this run has 8"):
        run(resume=True, lora_rank=2, lora_alpha=8)


def test_evaluation_does_not_depend_on_packing(run, make_dataset, documents):
    held_out = documents(40, 60, seed=9)
    losses = []
    for packer, batch in (("ffd", 64), ("ffd", 256), ("bucketed", 128), ("unpacked", 64)):
        path = make_dataset({"main": held_out}, 64, packer, f"held-out-{batch}").path
        packs = batch // 48
        _, lines = run(
            str(path.name), steps=1, lr=0.0, eval=str(path), tokens_per_batch=batch, packs_per_step=packs, force=True
        )
        losses.append(column(lines, "eval_loss")[0])
        assert lines[-1]["eval_targets"] == sum(sum(mask) for _, mask in held_out)
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
        figures.append([column(lines, key) for key in ("loss", "grad_norm", "targets")])
    assert figures[0] == [pytest.approx(values, rel=1e-5) for values in figures[1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 50}, "token id 96 in the dataset"),
        ({"model_type": "gpt2", "max_position_embeddings": 20}, "expected at most 20"),
    ],
    ids=["vocabulary", "positions"],
)
def test_a_model_that_does_not_fit_the_dataset_is_refused(run, model_config, fields, message):
    with pytest.raises(PackError, match=message):
        run(model=model_config(**fields))


def test_an_unpacked_dataset_is_refused_unless_forced(run, make_dataset, documents):
    data = make_dataset({"main": documents(9, 30)}, 48, "unpacked")
    with pytest.raises(PackError, match=r"is unpacked.*--packer auto, or pass --force"):
        run("refused", dataset=str(data.path))
    assert run("forced", dataset=str(data.path), force=True)[0].steps == 4


def test_another_tokenizer_than_the_models_own_is_refused(
    run, dataset, model_config, tmp_path, tokenizer_dir, other_tokenizer_dir
):
    shutil.copytree(tokenizer_dir, dataset.path / "tokenizer", dirs_exist_ok=True)
    model = load_model(model_config()).model
    for name, tokenizer, accepted in (("same", tokenizer_dir, True), ("other", other_tokenizer_dir, False)):
        model.save_pretrained(tmp_path / name)
        shutil.copyfile(Path(tokenizer) / "tokenizer.json", tmp_path / name / "tokenizer.json")
        if accepted:
            run(f"run-{name}", model=str(tmp_path / name))
        else:
            with pytest.raises(PackError, match=r"its tokenizer differs .*model"):
                run(f"run-{name}", model=str(tmp_path / name))
            run(f"forced-{name}", model=str(tmp_path / name), force=True)


def test_a_held_out_dataset_of_another_tokenizer_is_refused(run, dataset, tokenizer_dir, other_tokenizer_dir):
    held_out = dataset.path.parent / "held-out"
    shutil.copytree(dataset.path, held_out)
    shutil.copytree(tokenizer_dir, dataset.path / "tokenizer", dirs_exist_ok=True)
    shutil.copytree(other_tokenizer_dir, held_out / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(PackError, match=r"--eval .*held-out: its tokenizer differs"):
        run(eval=str(held_out))
    run("forced", eval=str(held_out), force=True)


def test_a_dataset_without_a_target_is_refused(run, make_dataset):
    data = make_dataset({"main": [([1, 2, 3], [0, 0, 0])] * 40}, 48)
    with pytest.raises(PackError, match="has no targets; expected some"):
        run(dataset=str(data.path))


def test_a_model_without_attention_trains_on_one_document_a_row(run, make_dataset, documents, tmp_path):
    data = make_dataset({"main": documents(40, 30)}, 48, "bucketed")
    config = {"model_type": "mamba", "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    (tmp_path / "mamba.json").write_text(json.dumps(config))
    result, lines = run("mamba", dataset=str(data.path), model=str(tmp_path / "mamba.json"), steps=1)
    assert result.steps == 1
    assert lines[0]["tflops_per_s"] > 0


def test_the_cost_of_a_model_by_hand(model_config):
    model = load_model(model_config()).model
    cost = cost_of(model)
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24  # q, k and v of one grouped head, o, feed-forward
    assert cost.per_token == 6 * (2 * layer + 16 * 97)  # the embedding is a lookup, the head is not
    assert cost.per_pair == 2 * 12 * 2 * 8
    assert cost.sliding_window is None
    tied = cost_of(load_model(model_config(tie_word_embeddings=True)).model)
    assert tied.per_token == cost.per_token


def test_the_cost_of_a_window_is_counted_inside_it(model_config):
    cost = cost_of(load_model(model_config("mistral-window")).model)
    assert (cost.sliding_window, cost.per_pair, cost.per_window_pair) == (5, 0, 2 * 12 * 2 * 8)


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
    assert column(compiled, "loss") == pytest.approx(column(plain, "loss"), rel=1e-5)
