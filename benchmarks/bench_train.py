"""What does the training loop cost beside the model, and how does it compare with Trainer and SFTTrainer?

The same model from the same config takes the same documents, once around, with AdamW in fp32 on a CPU or bf16 autocast
on a GPU: (1) batches that are on the device already, forward, backward and optimizer alone: the bound; (2) `pack train`
on the same ones; (3) transformers.Trainer with DataCollatorWithFlattening; (4) TRL's SFTTrainer with packing. Attention
of (3) and (4) is what they take here: flash attention where installed, otherwise a dense mask. Speed is real tokens
over time after the first steps, start-up and saving left out.

    python benchmarks/bench_train.py --quick
    python benchmarks/bench_train.py --model ./config.json --data data/corpus --steps 50
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from write_up import WriteUp, middle, run, tell

from shards import Dataset
from trainer import TrainConfig, train
from trainer.bench.strategies import split_pack
from trainer.loader import PackLoader
from trainer.model.loading import load_model
from trainer.model.loss import PackedLM

PACKAGES = ("shardpack", "torch", "transformers", "trl", "accelerate", "flash-attn", "liger-kernel", "numpy")
SKIP = 3  # steps


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def resident_batches(arguments: argparse.Namespace, dataset: Dataset) -> float:
    """Return tokens/s of the batches that `pack train` takes, all on the device before the clock starts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    computed = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = load_model(arguments.model, device=device, compute_dtype=computed)
    lm = PackedLM(loaded.model, backend=loaded.backend, plain_head=loaded.report.plain_head)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-4, fused=True)
    loader = PackLoader(dataset, tokens_per_batch=arguments.packs * dataset.seq_len, device=device)
    with closing(loader.forever()) as endless:
        batches = list(islice(endless, arguments.steps))
    for number, batch in enumerate(batches):
        if number == SKIP:
            begin = now()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = lm(batch, batch["num_targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return sum(batch["num_tokens"] for batch in batches[SKIP:]) / (now() - begin)


def now() -> float:
    """Return the time when the device has done everything."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def pack_train(arguments: argparse.Namespace, dataset: Dataset) -> float:
    """Return tokens/s of `pack train` between its log lines."""
    with tempfile.TemporaryDirectory(prefix="bench-train-") as out:
        config = TrainConfig(
            dataset=str(dataset.path), model=arguments.model, out=f"{out}/run", steps=arguments.steps, lr=1e-4,
            tokens_per_batch=arguments.packs * dataset.seq_len, log_every=min(10, arguments.steps - SKIP),
            dtype="bf16" if torch.cuda.is_available() else "fp32", progress=False,
        )  # fmt: skip
        train(config)
        lines = [json.loads(line) for line in Path(out, "run", "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["step"] > SKIP and "tokens" in line]
    kept = kept[1:] or kept
    return sum(line["tokens"] for line in kept) / sum(line["tokens"] / line["tokens_per_s"] for line in kept)


class Clock:
    """Notes when a trainer ends each step, and the tokens of every batch that its collator made."""

    def __init__(self, collator: Any) -> None:
        from transformers import TrainerCallback

        self.collator, self.tokens, self.ends = collator, [], []
        ends = self.ends

        class Ends(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                ends.append(now())

        self.callback = Ends()

    def __call__(self, rows: Any) -> Any:
        batch = self.collator(rows)
        self.tokens.append(batch["input_ids"].numel())
        return batch

    def rate(self) -> float:
        """Return tokens/s after the first steps."""
        return sum(self.tokens[SKIP : len(self.ends)]) / (self.ends[-1] - self.ends[SKIP - 1])


def rows_of(dataset: Dataset, packs: np.ndarray) -> list[dict[str, list[int]]]:
    """Return the documents of some packs as lists, in their order."""
    segments = [segment for pack in packs.tolist() for segment in split_pack(dataset.pack(pack))]
    return [{"input_ids": ids.astype(np.int64).tolist()} for ids, *_ in segments]


def model_for(arguments: argparse.Namespace) -> Any:
    """Return the model as transformers makes it, with the attention that it would choose for packed rows."""
    import importlib.util

    from transformers import AutoModelForCausalLM

    from trainer.model.loading import load_config

    torch.manual_seed(0)
    flash = torch.cuda.is_available() and importlib.util.find_spec("flash_attn")
    config = load_config(arguments.model)
    return AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2" if flash else "sdpa")


def their_settings(arguments: argparse.Namespace, out: str, rows: int) -> dict[str, Any]:
    return {
        "output_dir": out, "max_steps": arguments.steps, "per_device_train_batch_size": rows, "report_to": [],
        "logging_strategy": "no", "save_strategy": "no", "bf16": torch.cuda.is_available(), "learning_rate": 1e-4,
        "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(), "optim": "adamw_torch_fused",
    }  # fmt: skip


def hf_trainer(arguments: argparse.Namespace, dataset: Dataset) -> float:
    """Return tokens/s of transformers.Trainer on flattened batches of as many documents as packs hold on average."""
    import datasets
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    packs = np.random.default_rng(0).permutation(len(dataset))[: arguments.packs * (arguments.steps + 1)]
    rows = rows_of(dataset, packs)
    clock = Clock(DataCollatorWithFlattening(return_flash_attn_kwargs=True))
    with tempfile.TemporaryDirectory(prefix="bench-train-") as out:
        settings = their_settings(arguments, out, max(1, round(len(rows) / len(packs) * arguments.packs)))
        trainer = Trainer(
            model=model_for(arguments), args=TrainingArguments(remove_unused_columns=False, **settings),
            train_dataset=datasets.Dataset.from_list(rows), data_collator=clock, callbacks=[clock.callback],
        )  # fmt: skip
        trainer.train()
    return clock.rate()


def trl_trainer(arguments: argparse.Namespace, dataset: Dataset) -> float:
    """Return tokens/s of TRL's SFTTrainer, which packs the same documents by itself."""
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    packs = np.random.default_rng(0).permutation(len(dataset))[: arguments.packs * (arguments.steps + 1)]
    with tempfile.TemporaryDirectory(prefix="bench-train-") as out:
        settings = their_settings(arguments, out, arguments.packs)
        names = {field.name for field in fields(SFTConfig)}  # on by default in TRL, under its old or new name
        settings["activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"] = (
            False
        )
        trainer = SFTTrainer(
            model=model_for(arguments), processing_class=AutoTokenizer.from_pretrained(arguments.tokenizer),
            args=SFTConfig(packing=True, padding_free=True, max_length=dataset.seq_len, **settings),
            train_dataset=datasets.Dataset.from_list(rows_of(dataset, packs)),
        )  # fmt: skip
        clock = Clock(trainer.data_collator)
        trainer.data_collator = clock
        trainer.add_callback(clock.callback)
        trainer.train()
    return clock.rate()


WAYS = {
    "bound: the same batches, on the device": resident_batches,
    "pack train": pack_train,
    "transformers.Trainer, DataCollatorWithFlattening": hf_trainer,
    "TRL SFTTrainer, packing": trl_trainer,
}


def prepared(arguments: argparse.Namespace, folder: Path) -> Dataset:
    """Return the dataset asked for, or build that of the demo."""
    if arguments.data:
        arguments.tokenizer = str(Path(arguments.data) / "tokenizer")
        return Dataset(arguments.data)
    from pipeline import BuildConfig, build
    from trainer.demo_corpus import SEQ_LEN, VOCAB_SIZE, make_corpus, write_model_config

    files, tokenizer = make_corpus(folder)
    sources = tuple(f"{file.stem}={file}" for file in files)
    out = str(folder / "data")
    build(BuildConfig(sources=sources, out=out, tokenizer=str(tokenizer), seq_len=SEQ_LEN, workers=2))
    arguments.tokenizer = str(tokenizer)
    if arguments.model is None:
        arguments.model = str(folder / "model.json")
        write_model_config(Path(arguments.model), VOCAB_SIZE, SEQ_LEN)
        if arguments.quick:
            small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
            Path(arguments.model).write_text(json.dumps(json.loads(Path(arguments.model).read_text()) | small))
    return Dataset(folder / "data")


def measure(arguments: argparse.Namespace) -> WriteUp:
    if arguments.quick:
        arguments.steps = min(arguments.steps, SKIP + 2)
    if arguments.model is None and arguments.data:
        sys.exit("--data needs --model")
    ways = {name: way for name, way in WAYS.items() if name in (arguments.ways or WAYS)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="bench-train-data-") as folder:
        dataset = prepared(arguments, Path(folder))
        for _ in range(arguments.repeats):
            for name, way in ways.items():
                rates[name].append(way(arguments, dataset))
                tell(f"{name}: {rates[name][-1]:,.0f} tokens/s")
        shape = json.loads(Path(arguments.model).read_text()) if arguments.model.endswith(".json") else arguments.model
    bound = statistics.median(rates[next(iter(ways))])
    rows = [[name, middle(found), f"{statistics.median(found) / bound:.3f}"] for name, found in rates.items()]
    setting = (
        f"Model {json.dumps(shape)}; {arguments.packs} packs of {dataset.seq_len} tokens a step, {arguments.steps} "
        f"steps, {torch.get_num_threads()} threads. Median (range) of {arguments.repeats} runs."
    )
    return WriteUp("Training steps", [setting], [("", ["way", "real tokens/s", "share of the bound"], rows)])


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="config JSON, directory or name (default: the demo's)")
    parser.add_argument("--data", help="dataset directory of that model's tokenizer (default: the demo's)")
    parser.add_argument("--packs", type=int, default=2, help="packs in a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help="some of the ways, the bound first")


if __name__ == "__main__":
    run("train", __doc__ or "", measure, PACKAGES, add_flags)
