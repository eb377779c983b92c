"""Other trainers on our packs: the examples give the losses of `pack train`, and what would go wrong is refused."""

import json
import runpy
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from pipeline import BuildConfig, build
from pipeline.config import RecordOptions
from shards import Dataset, PackError
from trainer import PackedCollator, PackedLM, TrainConfig, WeightedTrainer, load_model
from trainer.distributed import World
from trainer.evaluation import evaluate
from trainer.loop import train
from trainer.model.loading import load_config

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 4


@pytest.fixture
def model_dir(llama, tmp_path) -> str:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(load_config(llama)).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def quiet_arguments(packs: int) -> dict:
    """Every pack in every step, so that the order does not matter; the settings of `pack_train_losses`."""
    size = max(divisor for divisor in range(1, 8) if packs % divisor == 0)
    return {
        "max_steps": STEPS,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": packs // size,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def pack_train_losses(packed: str, model_dir: str, out: Path, packs: int) -> list[float]:
    train(
        TrainConfig(
            dataset=packed,
            model=model_dir,
            out=str(out),
            steps=STEPS,
            packs_per_step=packs,
            lr=1e-2,
            schedule="linear",
            dtype="fp32",
            log_every=1,
            device="cpu",
        )
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


@pytest.mark.parametrize("example", ["with_transformers", "with_trl"])
def test_an_example_gives_the_losses_of_pack_train(example, packed, model_dir, tmp_path):
    packs = len(Dataset(packed))
    assert packs > 1
    expected = pack_train_losses(packed, model_dir, tmp_path / "ours", packs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these libraries warn about themselves
        run = runpy.run_path(str(EXAMPLES / f"{example}.py"))["train"]
        trainer = run(packed, model_dir, str(tmp_path / "theirs"), **quiet_arguments(packs))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0]


def rows(packed: str) -> list[dict]:
    return [Dataset(packed)[i] for i in range(3)]


def test_both_kinds_of_rows_give_the_same_batch(packed):
    ours = PackedCollator()(rows(packed))
    lists = datasets.load_from_disk(packed)
    theirs = PackedCollator()([lists[i] for i in range(3)])
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]


def test_labels_are_unshifted_and_never_start_a_document(packed):
    batch = PackedCollator()(rows(packed))
    starts = batch["cu_seq_lens_q"][:-1].long()
    assert (batch["labels"][0, starts] == -100).all()
    assert (batch["position_ids"][0, starts] == 0).all()
    assert int((batch["labels"] != -100).sum()) == sum(row["num_targets"] for row in rows(packed))
    targets = batch["labels"] != -100
    assert torch.equal(batch["labels"][targets], batch["input_ids"][targets])
    assert type(batch["max_length_q"]) is int
    assert batch["max_length_q"] == max(row["max_seqlen"] for row in rows(packed))
    assert "attention_mask" not in batch


def test_columns_removed_by_the_trainer_are_refused(packed, model_dir, tmp_path):
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir),
        args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True),
        train_dataset=Dataset(packed),
        data_collator=PackedCollator(),
    )
    with warnings.catch_warnings(), pytest.raises(PackError, match="Set remove_unused_columns=False"):
        trainer.train()


def test_rows_cut_by_the_trainer_are_refused(packed, model_dir, tmp_path):
    arguments = {"remove_unused_columns": False, "max_length": 64, "use_cpu": True, "bf16": False, "disable_tqdm": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = SFTTrainer(
            model=model_dir,
            args=SFTConfig(output_dir=str(tmp_path), report_to="none", **arguments),
            train_dataset=datasets.load_from_disk(packed),
            data_collator=PackedCollator(),
            processing_class=AutoTokenizer.from_pretrained(f"{packed}/tokenizer"),
        )
        with pytest.raises(PackError, match="skip_prepare_dataset"):
            trainer.train()


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_whose_documents_see_each_other_is_refused_where_the_collator_is_told(llama, safe):
    opt = {"model_type": "opt", "vocab_size": 64, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2,
           "num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    if safe:
        model = load_model(llama).model
        assert model.training
        PackedCollator(model)
        assert model.training
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**opt))
        with pytest.raises(PackError, match=r"in OPTForCausalLM with \w+ attention, documents of a row see each other"):
            PackedCollator(model)


def test_a_collator_that_knows_no_model_says_once_that_nobody_checked(caplog, monkeypatch):
    monkeypatch.setattr(PackedCollator, "_said", False)
    PackedCollator()
    PackedCollator()
    assert caplog.text.count("PackedCollator: got no model") == 1


class TestWeights:
    """Packs with weights in other trainers."""

    @pytest.fixture
    def weighted(self, packed, tmp_path) -> str:
        """Texts of several weights, with the tokenizer of `packed`."""
        path = tmp_path / "weighted.jsonl"
        words = [
            "packs",
            "hold",
            "documents",
            "of",
            "many",
            "weights",
            "the",
            "loss",
            "is",
            "their",
            "weighted",
            "mean",
        ]
        records = [{"text": " ".join(words[n % 7 :] * (1 + n % 3)), "w": (0.25, 1, 3)[n % 3]} for n in range(24)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        build(
            BuildConfig(
                sources=path, out=tmp_path / "weighted", tokenizer=f"{packed}/tokenizer", seq_len=64,
                records=RecordOptions(weights_field="w"),
            )
        )  # fmt: skip
        return str(tmp_path / "weighted")

    def arguments(self, kind: type, out: Path, **more: Any) -> Any:
        return kind(output_dir=str(out), remove_unused_columns=False, **more)

    @pytest.mark.parametrize("base", [Trainer, SFTTrainer])
    def test_a_weighted_trainer_gives_the_losses_of_pack_train(self, base, weighted, model_dir, tmp_path):
        dataset = Dataset(weighted)
        expected = pack_train_losses(weighted, model_dir, tmp_path / "ours", len(dataset))
        weighted_trainer = type("Mine", (WeightedTrainer, base), {})
        more = {"dataset_kwargs": {"skip_prepare_dataset": True}} if base is SFTTrainer else {}
        kind = SFTConfig if base is SFTTrainer else TrainingArguments
        own = {"processing_class": AutoTokenizer.from_pretrained(f"{weighted}/tokenizer")} if base is SFTTrainer else {}
        model = load_model(model_dir).model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these libraries warn about themselves
            trainer = weighted_trainer(
                model=model, args=self.arguments(kind, tmp_path / "theirs", **quiet_arguments(len(dataset)), **more),
                train_dataset=datasets.load_from_disk(weighted).with_format("numpy"),
                data_collator=PackedCollator(model), **own,
            )  # fmt: skip
            trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert losses == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("ours", [True, False])
    def test_any_other_trainer_finds_no_labels(self, weighted, model_dir, tmp_path, ours):
        model = load_model(model_dir).model if ours else AutoModelForCausalLM.from_pretrained(model_dir)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                model=model, args=self.arguments(TrainingArguments, tmp_path / "theirs", **quiet_arguments(1)),
                train_dataset=Dataset(weighted), data_collator=PackedCollator(),
            )  # fmt: skip
            with pytest.raises((ValueError, PackError), match="'weighted_labels'" if ours else "did not return a loss"):
                trainer.train()

    def test_an_evaluation_batch_is_divided_by_its_weights(self, weighted, model_dir, tmp_path):
        model, dataset = load_model(model_dir).model, Dataset(weighted)
        weighted_trainer = type("Mine", (WeightedTrainer, Trainer), {})
        arguments = quiet_arguments(1) | {"per_device_eval_batch_size": len(dataset)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = weighted_trainer(
                model=model, args=self.arguments(TrainingArguments, tmp_path / "theirs", **arguments),
                eval_dataset=dataset, data_collator=PackedCollator(model),
            )  # fmt: skip
            found = trainer.evaluate()["eval_loss"]
        module = PackedLM(model, backend="cpu", plain_head=True)
        world = World(device=torch.device("cpu"))
        ours = evaluate(module, module, dataset, world, tokens_per_batch=64, autocast=nullcontext())
        assert found == pytest.approx(ours["eval_loss"], rel=1e-4)
