"""How long does the commit of many windows take, and how much memory?

Synthetic sidecars of windows that were built (the shards beside them are not needed for it): what the driver reads of
them before its commit, and the commit itself, in a fresh process (Linux).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from write_up import WriteUp, figure, middle, run, tell

from shards.counts import empty_counts, length_histogram
from shards.plan import make_plan, make_source, plan_id
from shards.publish import LocalStore, canonical, seal
from shards.schema import layout_of
from shards.sidecar import make_sidecar, shard_name, sidecar_name

PACKAGES = ("shardpack", "numpy", "pyarrow")
SEQ_LEN = 8192
PACKS = 64
SIZES = (10_000, 100_000)
QUICK = (100,)
KINDS = 100  # windows that differ; the others repeat their numbers
MEASURE = """
import json, sys, time
from pathlib import Path
from pipeline.building.sidecars import all_sidecars, summarize_sidecars
from shards.manifest import commit
from shards.plan import parse_plan, plan_id
from shards.publish import LocalStore

def peak():  # of this process alone: ru_maxrss begins with that of its parent
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))

store, number = LocalStore(sys.argv[1]), int(sys.argv[2])
plan = parse_plan(store.get("plan.json"), "plan.json")
(store.root / "manifest.json").unlink(missing_ok=True)
wall, cpu, imported = time.perf_counter(), time.process_time(), peak()
summary = summarize_sidecars(store, plan_id(plan), number, 0.01)
looked = time.perf_counter()
manifest = commit(store, plan, all_sidecars(store, plan_id(plan), number), {}, {})
done = time.perf_counter()
assert manifest["totals"]["packs"] == number * int(sys.argv[3])
assert len(summary.windows) == number
print(json.dumps(dict(look=looked - wall, commit=done - looked, cpu=time.process_time() - cpu,
                      imported=imported, peak=peak())))
"""


def write_sidecars(path: Path, number: int) -> Path:
    """Write the plan and `number` sidecars of windows of `PACKS` packs each, three documents a pack."""
    store = LocalStore(path)
    store.create()
    file = {"name": "corpus.jsonl", "bytes": number, "format": "jsonl", "compression": None, "fingerprint": "0" * 32}
    plan = make_plan(
        seq_len=SEQ_LEN,
        loss_mask=False,
        tokenizer={"digest": "0" * 64, "vocab_size": 100_000, "max_id": 99_999},
        sources=[make_source("corpus", files=[file])],  # type: ignore[list-item]
        windows=[[0, [[0, window, window + 1]]] for window in range(number)],
        part_bytes=1,
    )
    store.put("plan.json", canonical(plan))
    rng = np.random.default_rng(0)
    schema, identity = layout_of(plan).index_schema(), plan_id(plan)
    kinds = [_window(rng, schema) for _ in range(KINDS)]
    for window in range(number):
        lengths, index = kinds[window % KINDS]
        tokens, documents = int(lengths.sum()), len(lengths)
        counts = empty_counts()
        counts["documents"] |= {"read": documents, "packed": documents}
        counts["tokens"] |= {"read": tokens, "packed": tokens}
        counts["targets"] |= {"read": tokens - documents, "packed": tokens - documents}
        counts |= {"segments": documents, "packs": PACKS}
        digest = f"{window:032x}"[::-1]
        record = {
            "file": shard_name(window, digest), "bytes": 6 * tokens, "xxh3_128": digest, "rows": PACKS,
            "tokens": tokens, "segments": documents,
        }  # fmt: skip
        sidecar = make_sidecar(
            plan_id=identity,
            window=window,
            source="corpus",
            shard=record,  # type: ignore[arg-type]
            counts=counts,
            index=index,
            bound_packs=PACKS,
            lengths=length_histogram(lengths),
            segment_lengths=length_histogram(lengths),
            spans=[[0, window, window + 1, 0, documents]],
            raw_bytes=4 * tokens,
            facts={
                "tokenizer": {"engine": "tokenizers", "version": "0", "guard": {"result": "equal"}},
                "files": [[0, 0, 0]],
                "stages_s": {"read": 0.1, "tokenize": 1.0, "pack": 0.1},
            },
        )
        (path / sidecar_name(window)).write_bytes(seal(sidecar))
    return path


def _window(rng: np.random.Generator, schema: pa.Schema) -> tuple[np.ndarray, pa.RecordBatch]:
    """Return the lengths of a window's documents, and its rows of the index."""
    columns = [pa.array(rng.integers(1, 100, PACKS)).cast(field.type) for field in schema]
    return rng.integers(1000, SEQ_LEN // 3, 3 * PACKS), pa.record_batch(columns, schema=schema)


def measure(arguments: argparse.Namespace) -> WriteUp:
    """Commit each number of windows in fresh processes."""
    rows = []
    for number in QUICK if arguments.quick else SIZES:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
            path = write_sidecars(Path(directory), number)
            found = []
            for _ in range(arguments.repeats):
                command = [sys.executable, "-c", MEASURE, str(path), str(number), str(PACKS)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(json.loads(done.stdout))
                tell(f"{number:,} windows: {found[-1]}")
        rows.append(
            [
                f"{number:,}",
                middle([each["look"] for each in found]),
                middle([each["commit"] for each in found]),
                middle([each["look"] + each["commit"] for each in found]),
                middle([each["cpu"] for each in found]),
                figure(max(each["peak"] for each in found) / 1e6),
                figure(max(each["imported"] for each in found) / 1e6),
            ]
        )
    columns = ["windows", "reading sidecars, s", "commit, s", "both, s", "CPU of both, s", "peak memory, MB"]
    columns += ["of which imports, MB"]
    setting = (
        f"Windows of {PACKS} packs and {3 * PACKS} documents, page cache warm. Median (range) of {arguments.repeats} "
        f"processes; load average when it ended: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, so that wall time "
        "counts waiting for other work on a busy machine and CPU time does not."
    )
    return WriteUp("Committing many windows", [setting], [("", columns, rows)])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add where the synthetic sidecars go."""
    parser.add_argument("--scratch", type=Path, default=None, help="directory for 600 MB")


if __name__ == "__main__":
    run("finalize", __doc__ or "", measure, PACKAGES, add_flags)
