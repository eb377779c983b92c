"""Other trainers on our packs: the examples give the losses of `pack train`, and what would go wrong is refused."""

import json
import runpy
import warnings
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from shards import Dataset, PackError
from trainer import PackedCollator, TrainConfig, load_model
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
