"""Everything that is worth asking a GPU, in 8 minutes or less, without network: run it where one is at hand.

Parts, in order: do all attention backends equal plain attention; how long do their kernels take over distributions of
document lengths; what do padding, buckets and packing make of the same documents, on a model of 1.24B and on the shape
of distilgpt2; what does the loop cost beside the same batches on the device, with compiled layers and without. Models
have random weights, documents random ids. Results are written after every part, as `gpu-suite.json` and `gpu-suite.md`
under --out; parts that find no time left say so, and a second call runs what is missing.
On a CPU it runs in a tiny form, so that it is tested beforehand.

Needs torch 2.11, transformers, numba, pyarrow, xxhash and rich. From a source tree:

    PYTHONPATH=. python benchmarks/gpu_suite.py --out results
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_dataset import write_dataset
from references import REFERENCES
from torch import Tensor

from shards import Dataset
from trainer import TrainConfig, distributed
from trainer.bench.compare import describe_machine, run_comparison
from trainer.bench.strategies import STRATEGIES, Sizes, StepPacks, split_pack
from trainer.loop import LogInterval, log, take_step
from trainer.metrics import peak_flops
from trainer.model.backends.interface import Needs
from trainer.model.backends.registry import ATTENTION_BACKENDS
from trainer.model.loading import load_model
from trainer.run import Run, set_up

TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}  # largest difference over largest value
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
Table = tuple[str, list[str], list[list[str]]]
Part = Callable[["Suite"], Iterator[Table]]


@dataclass
class Suite:
    """What all parts share."""

    device: torch.device
    tiny: bool
    folder: Path
    figures: dict[str, Any]
    "What becomes the JSON."

    @property
    def dtype(self) -> torch.dtype:
        """Type in which attention computes."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def backends(self, head_dim: int) -> list[str]:
        """Return the attention backends that run here; plain torch only where there is nothing else."""
        needs = Needs(device=self.device, dtype=self.dtype, head_dim=head_dim, value_dim=head_dim)
        names = [name for name, backend in ATTENTION_BACKENDS.items() if backend.unsupported_reason(needs) is None]
        return [name for name in names if name != "cpu" or self.device.type == "cpu"]


def heads(suite: Suite, tokens: int, num_heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """Return random q, k, v and an upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, n, head_dim) for n in (num_heads, kv_heads, kv_heads, num_heads)]
    return [torch.randn(shape, generator=generator).to(suite.device, suite.dtype) for shape in shapes]


def offsets(lengths: np.ndarray, device: torch.device) -> Tensor:
    """Return cu_seqlens."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: int | None, scale: float) -> Tensor:
    """Compute attention in fp32 by its definition: all scores, a mask, a softmax."""
    place = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(cu[1:], place, right=True)
    behind = place[:, None] - place
    mask = (document[:, None] == document) & (behind >= 0) & (behind < (window or len(q)))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def equality(suite: Suite) -> Iterator[Table]:
    """Check every backend against the definition, forward and backward."""
    lengths = np.array([0, 1, 33, 0, 7, 64, 20] if suite.tiny else [0, 1, 700, 33, 0, 7, 1024, 64, 129, 90])
    rows = suite.figures["equality"] = []
    for head_dim in (16,) if suite.tiny else (64, 96, 128):
        q, k, v, upstream = heads(suite, int(lengths.sum()), 4, 2, head_dim)
        cu, longest, scale = offsets(lengths, suite.device), int(lengths.max()), head_dim**-0.5
        for window in (None, 16):
            exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
            out = plain_attention(*exact, cu, window, scale)
            wanted = [out.detach(), *torch.autograd.grad(out, exact, upstream.float())]
            for name in suite.backends(head_dim):
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                row = {"backend": name, "head_dim": head_dim, "window": window, "off": [], "equal": False}
                rows.append(row)
                try:
                    out = ATTENTION_BACKENDS[name](*leaves, cu, longest, window, scale)
                    found = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
                except (RuntimeError, TypeError) as error:  # a kernel that refuses is a row, not the end
                    row["failed"] = str(error).partition("\n")[0]
                    continue
                pairs = zip(found, wanted, strict=True)
                row["off"] = [float((ours.float() - it).abs().max() / it.abs().max()) for ours, it in pairs]
                row["equal"] = max(row["off"]) <= TOLERANCE[suite.dtype]
    columns = ["backend", "head_dim", "window", "output", "dq", "dk", "dv", "equal"]
    yield (
        "Backends against plain fp32 attention: largest difference over largest value", columns,
        [
            [
                row["backend"], str(row["head_dim"]), str(row["window"] or "–"),
                *([f"{each:.1e}" for each in row["off"]] or ["", "", "", ""]),
                "yes" if row["equal"] else row.get("failed", "NO"),
            ]
            for row in rows
        ],
    )  # fmt: skip


def seconds(suite: Suite, work: Callable[[], object], repeats: int = 7) -> float:
    """Return the median time of the device for a piece of work."""
    for _ in range(2):
        work()
    found = []
    for _ in range(repeats):
        if suite.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def lengths_like(name: str, tokens: int) -> np.ndarray:
    """Return document lengths that add up to exactly `tokens`."""
    if name.isdigit():
        return np.full(tokens // int(name), int(name))
    drawn = np.random.default_rng(0).lognormal(np.log(300), 1.0, tokens).clip(1, 8192).astype(np.int64)
    kept = drawn[: int(np.searchsorted(drawn.cumsum(), tokens))]
    rest = tokens - int(kept.sum())
    return np.append(kept, rest) if rest else kept


def kernels(suite: Suite) -> Iterator[Table]:
    """Time forward, and forward with backward, over distributions of document lengths."""
    tokens, num_heads, kv_heads = (256, 4, 2) if suite.tiny else (16384, 32, 8)
    rows = suite.figures["kernels"] = []
    for head_dim in (16,) if suite.tiny else (64, 128):
        q, k, v, upstream = heads(suite, tokens, num_heads, kv_heads, head_dim)
        for name in ("32", "128", "lognormal") if suite.tiny else ("32", "128", "512", "2048", "8192", "lognormal"):
            lengths = lengths_like(name, tokens)
            cu, longest = offsets(lengths, suite.device), int(lengths.max())
            flops = (
                2 * head_dim * num_heads * float((lengths * (lengths + 1)).sum())
            )  # forward; backward is 2.5 times that
            for backend in suite.backends(head_dim):
                attend = ATTENTION_BACKENDS[backend]
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]

                def forward(attend: Any = attend, leaves: Any = leaves, cu: Any = cu, longest: int = longest) -> Tensor:
                    out: Tensor = attend(*leaves, cu, longest, None, leaves[0].shape[-1] ** -0.5)
                    return out

                def both(forward: Any = forward, leaves: Any = leaves, upstream: Any = upstream) -> object:
                    return torch.autograd.grad(forward(), leaves, upstream)

                try:
                    there, back = seconds(suite, forward), seconds(suite, both)
                except (RuntimeError, TypeError) as error:
                    suite.figures["left_out"].append(f"{backend}, documents of {name}: {error}".partition("\n")[0])
                    continue
                rows.append(
                    {
                        "documents": name, "head_dim": head_dim, "backend": backend, "forward_ms": there * 1e3,
                        "both_ms": back * 1e3, "forward_tflops": flops / there / 1e12,
                        "both_tflops": 3.5 * flops / back / 1e12,
                    }
                )  # fmt: skip
    columns = ["documents of", "head_dim", "backend", "forward ms", "TFLOP/s", "with backward ms", "TFLOP/s"]
    keys = ("forward_ms", "forward_tflops", "both_ms", "both_tflops")
    yield (
        f"Kernels over {tokens} tokens, {num_heads} heads, {kv_heads} of keys; FLOPs of causal pairs alone", columns,
        [[r["documents"], str(r["head_dim"]), r["backend"], *[f"{r[key]:.3g}" for key in keys]] for r in rows],
    )  # fmt: skip


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
        (*STRATEGIES, *REFERENCES), loaded, feed, sizes, dtype, tell, STRATEGIES | REFERENCES
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
    rows = suite.figures["loop"] = []
    for compiled in (False, True):
        rows += loop_rows(suite, dataset, model, packs, steps, compiled)
    columns = ["layers", "batches", "tokens/s", "ms/step", "TFLOP/s", "MFU", "waited for data", "peak GiB"]
    yield (
        f"Training loop, {packs} packs of {seq_len} a step", columns,
        [
            [
                "compiled" if row["compiled"] else "eager", row["batches"], f"{row['tokens_per_s']:,.0f}",
                f"{row['step_s'] * 1e3:,.1f}", f"{row['tflops_per_s']:.3g}", f"{row['mfu']:.1%}" if row["mfu"] else "–",
                f"{row['waited']:.2%}", f"{row['gib']:.1f}",
            ]
            for row in rows
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


PARTS: dict[str, Part] = {
    "equality": equality,
    "kernels": kernels,
    "llama-1b": strategies_llama,
    "distilgpt2": strategies_gpt2,
    "loop": loop,
}


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write(out: Path, figures: dict[str, Any]) -> None:
    """Write what there is so far; a kill leaves the files of before or those of now, never half of one."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ["# GPU suite", "", json.dumps(figures["machine"]), ""]
    shown = figures["tables"] | figures["unfinished"]
    for heading, columns, rows in (table for tables in shown.values() for table in tables):
        lines += [f"## {heading}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    lines += [f"* {part}: {said}" for part, said in figures["parts"].items()]
    notes = figures["left_out"] + [
        note for part in figures.values() if isinstance(part, dict) for note in part.get("notes", [])
    ]
    page = "\n".join(lines + [f"* {note}" for note in notes]) + "\n"
    for name, text in (("gpu-suite.json", json.dumps(figures, indent=1)), ("gpu-suite.md", page)):
        beside = out / f"{name}.tmp"
        beside.write_text(text, encoding="utf-8")
        beside.replace(out / name)


def read_earlier(out: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an earlier call on the same machine with the same versions, or empty ones."""
    file = out / "gpu-suite.json"
    if file.exists():
        earlier: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if earlier["machine"] == json.loads(json.dumps(machine)):
            return earlier
    return {"machine": machine, "parts": {}, "tables": {}, "unfinished": {}, "left_out": []}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-suite"), help="directory of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--dry-run", action="store_true", help="the tiny form on the CPU, whatever there is")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="some of the parts")
    parser.add_argument("--minutes", type=float, default=8, help="no part starts later than this")
    flags = parser.parse_args(arguments)
    device, begin = torch.device("cpu" if flags.dry_run else flags.device), time.perf_counter()
    figures = read_earlier(flags.out, describe_machine(device))
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        suite = Suite(device, device.type == "cpu", Path(folder), figures)
        for name in flags.parts:
            if name in figures["tables"]:  # an earlier call ran it to its end
                tell(f"{name}: there already")
                continue
            if time.perf_counter() - begin > 60 * flags.minutes:
                figures["parts"][name] = "no time left"
                continue
            started = time.perf_counter()
            tables: list[Table] = []
            try:
                tables.extend(PARTS[name](suite))
                figures["tables"][name] = tables
                figures["unfinished"].pop(name, None)
                figures["parts"][name] = f"{time.perf_counter() - started:.1f} s"
            except Exception as error:  # whatever it is, the parts to come are worth their time
                traceback.print_exc()
                figures["unfinished"][name] = tables
                figures["parts"][name] = f"failed: {type(error).__name__}: {error}"
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            tell(f"{name}: {figures['parts'][name]}")
            write(flags.out, figures)
    write(flags.out, figures)
    print((flags.out / "gpu-suite.md").read_text())
    if any(said.startswith("failed") for said in figures["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
