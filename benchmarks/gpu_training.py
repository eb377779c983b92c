"""What the GPU suite asks of whole steps: ways of feeding side by side, the loop, and how often the host waits."""

import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_kernels import Suite, Table, tell
from random_dataset import write_dataset
from references import REFERENCES

from shards import Dataset
from trainer import TrainConfig, distributed
from trainer.bench.compare import run_comparison
from trainer.bench.strategies import STRATEGIES, MakeStrategy, Sizes, SkippedStrategy, StepPacks, Strategy, split_pack
from trainer.loop import LogInterval, log, take_step
from trainer.metrics import peak_flops
from trainer.model.loading import LoadedModel, load_model
from trainer.run import Run, set_up

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": 1024,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 300,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
    },
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
}  # fmt: skip


def write_config(suite: Suite, name: str, config: dict[str, Any]) -> str:
    """Write a model's configuration; tiny where the suite is."""
    config = config | (TINY[config["model_type"]] if suite.tiny else {})
    path = suite.folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return str(path)


def random_lengths(number: int, median: float, longest: int) -> np.ndarray:
    """Return lognormal document lengths, in tokens."""
    drawn = np.random.default_rng(1).lognormal(np.log(median), 1.0, number)
    return drawn.clip(2, longest).astype(np.int64)


def in_time(suite: Suite, make: MakeStrategy) -> MakeStrategy:
    """Return a maker of strategies that makes none once the part has used its time."""

    def made(name: str, loaded: LoadedModel, sizes: Sizes, dtype: torch.dtype) -> Iterator[Strategy | SkippedStrategy]:
        if suite.is_over():
            yield SkippedStrategy(name, "no time left in this part")
        else:
            yield from make(name, loaded, sizes, dtype)

    return made


def strategies_of(suite: Suite, name: str, config: dict[str, Any], sizes: Sizes, median: float, steps: int) -> Table:
    """Run all strategies over documents of lognormal lengths; as many documents in a step as six padded batches."""
    lengths = random_lengths(6 * sizes.batch * (steps + 1), median, sizes.seq_len)
    model = write_config(suite, name, config)
    vocab_size = json.loads(Path(model).read_text())["vocab_size"]
    dataset = write_dataset(suite.folder / f"{name}-data", lengths, sizes.seq_len, vocab_size)
    packs = [dataset.pack(int(i)) for i in np.random.default_rng(0).permutation(len(dataset))]
    in_step = max(sizes.rows, len(packs) // (steps + 1))
    shuffled = np.random.default_rng(0)
    feed = []
    for start in range(0, in_step * steps, in_step):
        rows = packs[start : start + in_step]
        documents = [document for row in rows for document in split_pack(row)]
        feed.append(StepPacks(rows, [documents[i] for i in shuffled.permutation(len(documents))]))
    torch.manual_seed(0)
    dtype = "fp32" if suite.dtype == torch.float32 else "bf16"
    loaded = load_model(model, device=suite.device, compute_dtype=suite.dtype, packed=False)
    result = suite.figures[name] = run_comparison(
        (*STRATEGIES, *REFERENCES),
        loaded,
        feed,
        sizes,
        dtype,
        tell,
        {key: in_time(suite, make) for key, make in (STRATEGIES | REFERENCES).items()},
    )
    columns = ["strategy", "tokens/s", "x", "padding", "s/step", "peak GiB", "data", "loss", "TFLOP/s", "MFU"]
    rows = []
    for row in result["rows"]:
        if "failed" in row:
            rows.append([row["strategy"], row["failed"], *[""] * (len(columns) - 2)])
            continue
        wrong = " ≠" if row["strategy"] in result["disagreements"] else ""
        rows.append(
            [
                row["strategy"], f"{row['tokens_per_s']:,.0f}", f"{row['speedup']:.2f}", f"{row['padding']:.1%}",
                f"{row['step_s']['median']:.3g}", f"{(row['peak_bytes'] or 0) / 2**30:.1f}", f"{row['data_share']:.1%}",
                f"{row['loss']:.4f}{wrong}", f"{row['tflops_per_s']:.3g}", f"{row['mfu']:.1%}" if row["mfu"] else "–",
            ]
        )  # fmt: skip
    held = result["steps"]
    about = f"{result['parameters'] / 1e6:,.0f}M parameters, {dtype}, {held['documents']} documents"
    return (f"Strategies, {name}: {about}, {held['tokens']:,} tokens in {held['number']} steps", columns, rows)


def strategies_llama(suite: Suite) -> Iterator[Table]:
    """Compare strategies on the model of 1.24B."""
    sizes = Sizes(seq_len=8192, batch=8, tokens_per_batch=16384, longest=8192)
    tiny = Sizes(seq_len=64, batch=4, tokens_per_batch=128, longest=64)
    yield strategies_of(suite, "llama-1b", LLAMA, tiny if suite.tiny else sizes, 15 if suite.tiny else 300, 3)


def strategies_gpt2(suite: Suite) -> Iterator[Table]:
    """Compare strategies on the shape of distilgpt2, at context 512."""
    sizes = Sizes(seq_len=512, batch=8, tokens_per_batch=4096, longest=512)
    tiny = Sizes(seq_len=64, batch=4, tokens_per_batch=128, longest=64)
    yield strategies_of(suite, "distilgpt2", GPT2, tiny if suite.tiny else sizes, 15 if suite.tiny else 100, 8)


def loop(suite: Suite) -> Iterator[Table]:
    """Compare the loop with the same batches on the device, with compiled layers and without."""
    seq_len, packs, steps = (64, 2, 4) if suite.tiny else (8192, 4, 12)
    model = write_config(suite, "loop", LLAMA)
    vocab_size = json.loads(Path(model).read_text())["vocab_size"]
    number = (steps + 2) * packs * seq_len // (15 if suite.tiny else 490)
    dataset = write_dataset(
        suite.folder / "loop-data", random_lengths(number, 15 if suite.tiny else 300, seq_len), seq_len, vocab_size
    )
    suite.figures["loop"] = []
    for compiled in (False, True):
        if suite.is_over():
            break
        for row in loop_rows(suite, dataset, model, packs, steps, compiled):
            suite.add("loop", row)
    columns = ["layers", "batches", "tokens/s", "ms/step", "TFLOP/s", "MFU", "waited for data", "peak GiB"]
    yield (
        f"Training loop, {packs} packs of {seq_len} a step", columns,
        [
            [
                "compiled" if row["compiled"] else "eager", row["batches"], f"{row['tokens_per_s']:,.0f}",
                f"{row['step_s'] * 1e3:,.1f}", f"{row['tflops_per_s']:.3g}", f"{row['mfu']:.1%}" if row["mfu"] else "–",
                f"{row['waited']:.2%}", f"{row['gib']:.1f}",
            ]
            for row in suite.figures["loop"]
        ],
    )  # fmt: skip


def loop_rows(
    suite: Suite, dataset: Dataset, model: str, packs: int, steps: int, compiled: bool
) -> list[dict[str, Any]]:
    """Return two rows: batches that are on the device already, and batches from the loader."""
    with tempfile.TemporaryDirectory(dir=suite.folder) as out:
        config = TrainConfig(
            dataset=str(dataset.path), model=model, out=f"{out}/run", steps=4 * steps, compile=compiled, progress=False,
            tokens_per_batch=packs * dataset.seq_len, dtype="fp32" if suite.device.type == "cpu" else "bf16",
            device=suite.device.type,
        )  # fmt: skip
        run = set_up(config, distributed.start(suite.device.type))
        with closing(run.metrics), closing(run.loader.forever()) as stream:
            resident = list(islice(stream, steps))
            timed_steps(run, iter(resident), steps)  # kernels, compilation, memory
            rows = [timed_steps(run, iter(resident), steps) | {"batches": "on the device", "compiled": compiled}]
            del resident
            with closing(run.loader.forever()) as fresh:
                timed_steps(run, fresh, 2)
                rows.append(timed_steps(run, fresh, steps - 2) | {"batches": "from the loader", "compiled": compiled})
    return rows


def timed_steps(run: Run, batches: Iterator[Any], steps: int) -> dict[str, Any]:
    """Take steps as the loop does, one log line at the end; figures of all of them together."""
    device = run.world.device
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    interval = LogInterval(torch.zeros((), device=device))
    for _ in range(steps):
        norm, rate = take_step(run, batches, interval)
        run.step += 1
    log(run, interval, norm, rate)  # waits for the device
    elapsed = time.perf_counter() - interval.started
    peak = peak_flops(device)
    return {
        "tokens_per_s": interval.tokens / elapsed, "step_s": elapsed / steps,
        "tflops_per_s": interval.flops / elapsed / 1e12, "mfu": interval.flops / elapsed / peak if peak else None,
        "waited": interval.waited / elapsed,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
    }  # fmt: skip


def host_syncs(suite: Suite) -> Iterator[Table]:
    """Count how often the host waits for the device in a step between two log lines, by backend and loss."""
    seq_len, packs = (64, 2) if suite.tiny else (2048, 2)
    model = write_config(suite, "syncs", LLAMA | {"num_hidden_layers": 2})
    vocab_size = json.loads(Path(model).read_text())["vocab_size"]
    lengths = random_lengths(12 * packs * seq_len // 15, 15, seq_len)
    dataset = write_dataset(suite.folder / "syncs-data", lengths, seq_len, vocab_size)
    suite.figures["host-syncs"] = []
    for backend in suite.backends(64):
        for liger in ("off", "auto"):
            if suite.is_over():
                break
            found = syncs_of(suite, dataset, model, packs, backend, liger)
            suite.add("host-syncs", {"backend": backend, "liger": liger, "syncs": found})
    columns = ["backend", "liger", "host syncs a step"]
    rows = [[row["backend"], row["liger"], str(row["syncs"])] for row in suite.figures["host-syncs"]]
    yield "Host syncs in a step between log lines (none can be counted on a CPU)", columns, rows


def syncs_of(suite: Suite, dataset: Dataset, model: str, packs: int, backend: str, liger: str) -> int | None:
    """Return how often torch says that a step synchronizes; None on a CPU, where nothing can be waited for."""
    with tempfile.TemporaryDirectory(dir=suite.folder) as out:
        config = TrainConfig(
            dataset=str(dataset.path), model=model, out=f"{out}/run", steps=8, progress=False, attention=backend,
            liger=liger, tokens_per_batch=packs * dataset.seq_len, device=suite.device.type,
            dtype="fp32" if suite.device.type == "cpu" else "bf16", by_source=False,
        )  # fmt: skip
        run = set_up(config, distributed.start(suite.device.type))
        on_gpu = suite.device.type == "cuda"
        with closing(run.metrics), closing(run.loader.forever()) as stream:
            interval = LogInterval(torch.zeros((), device=suite.device))
            for _ in range(2):  # kernels are compiled, and memory is found
                take_step(run, stream, interval)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if on_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    take_step(run, stream, interval)
                finally:
                    if on_gpu:
                        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in said) if on_gpu else None
