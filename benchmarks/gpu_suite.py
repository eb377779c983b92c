"""Everything that is worth asking a GPU, in 8 minutes or less, without network: run it where one is at hand.

Parts, in order: what is installed; do all attention backends equal plain attention; how often does a step wait for the
device; what do padding, buckets and packing make of the same documents on a model of 1.24B; what does the loop cost
beside the same batches on the device, with compiled layers and without; how long do kernels take over distributions of
document lengths; and the ways of feeding on the shape of distilgpt2. Models have random weights, documents random ids.
Each part has a share of the time (`SHARES`). Results are written after every row, as `gpu-suite.json` and
`gpu-suite.md` under --out, which begins with the table for the README; parts that find no time left say so, and a
second call runs what is missing.
On a CPU it runs in a tiny form, so that it is tested beforehand.

Needs torch 2.11, transformers, numba, pyarrow, xxhash and rich. From a source tree:

    PYTHONPATH=. python benchmarks/gpu_suite.py --out results
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import Part, Suite, Table, environment, equality, kernels, tell
from gpu_training import host_syncs, loop, strategies_gpt2, strategies_llama

from trainer.bench.compare import describe_machine

PARTS: dict[str, Part] = {
    "environment": environment,
    "equality": equality,
    "host-syncs": host_syncs,
    "llama-1b": strategies_llama,
    "loop": loop,
    "kernels": kernels,
    "distilgpt2": strategies_gpt2,
}
SHARES = {"environment": 1, "equality": 4, "host-syncs": 3, "llama-1b": 10, "loop": 6, "kernels": 5, "distilgpt2": 5}
"""How the minutes are divided; what a part leaves goes to those after it."""


def write(out: Path, figures: dict[str, Any]) -> None:
    """Write what there is so far; a kill leaves the files of before or those of now, never half of one."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ["# GPU suite", "", json.dumps(figures["machine"]), "", *readme_table(figures)]
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


def run_part(suite: Suite, name: str) -> None:
    """Run one part and keep its tables; one that failed or ran out of time is run again by the next call."""
    figures, started, tables = suite.figures, time.perf_counter(), list[Table]()
    try:
        tables.extend(PARTS[name](suite))
        said = f"{time.perf_counter() - started:.1f} s"
        said = f"ran out of time after {said}, and left the rest out" if suite.stopped else said
    except Exception as error:  # whatever it is, the parts to come are worth their time
        traceback.print_exc()
        said = f"failed: {type(error).__name__}: {error}"
    whole = not suite.stopped and not said.startswith("failed")
    figures["unfinished"].pop(name, None)
    figures["tables" if whole else "unfinished"][name] = tables
    figures["parts"][name] = said
    gc.collect()
    if suite.device.type == "cuda":
        torch.cuda.empty_cache()
    tell(f"{name}: {said}")


def readme_table(figures: dict[str, Any]) -> list[str]:
    """Return the README's table of feeding a model of 1.24B, the fastest way first; empty before it was measured."""
    rows = figures.get("llama-1b", {}).get("rows", [])
    done = sorted((row for row in rows if "failed" not in row), key=lambda row: -row["tokens_per_s"])
    lines = [
        f"| {row['strategy']} | {row['tokens_per_s']:,.0f} | {row['speedup']:.2f}x | "
        f"{format(row['mfu'], '.1%') if row['mfu'] else '–'} | {(row['peak_bytes'] or 0) / 2**30:.1f} |"
        for row in done
    ]
    lines += [f"| {row['strategy']} | {row['failed']} | | | |" for row in rows if "failed" in row]
    return ["| feeding | real tokens/s | x | MFU | peak GiB |", "|---|---|---|---|---|", *lines, ""] if rows else []


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-suite"), help="directory of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--dry-run", action="store_true", help="the tiny form on the CPU, whatever there is")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="some of the parts")
    parser.add_argument("--minutes", type=float, default=8, help="time of all parts together, divided by their shares")
    flags = parser.parse_args(arguments)
    device, begin = torch.device("cpu" if flags.dry_run else flags.device), time.perf_counter()
    figures = read_earlier(flags.out, describe_machine(device))
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        suite = Suite(device, device.type == "cpu", Path(folder), figures, lambda: write(flags.out, figures))
        for name in flags.parts:
            if name in figures["tables"]:  # an earlier call ran it to its end
                tell(f"{name}: there already")
                continue
            left = begin + 60 * flags.minutes - time.perf_counter()
            if left < 0:
                figures["parts"][name] = "no time left"
                continue
            to_come = [SHARES.get(each, 1) for each in flags.parts if each not in figures["tables"]]
            suite.stopped, suite.deadline = False, time.perf_counter() + left * SHARES.get(name, 1) / sum(to_come)
            run_part(suite, name)
            write(flags.out, figures)
    write(flags.out, figures)
    print((flags.out / "gpu-suite.md").read_text())
    if any(said.startswith("failed") for said in figures["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
