"""A dataset of random ids with given document lengths, written without a tokenizer, a corpus or a build."""

from pathlib import Path

import numpy as np

from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.packing.rows import assemble_rows
from pipeline.tokens import Documents
from shards import Dataset
from shards.counts import empty_counts, length_histogram
from shards.manifest import commit
from shards.plan import make_plan, make_source, plan_id
from shards.publish import LocalStore, canonical, seal
from shards.schema import layout_of
from shards.sidecar import make_sidecar, sidecar_name
from shards.writer import write_shard

WINDOW_TOKENS = 1 << 24


def write_dataset(path: Path, lengths: np.ndarray, seq_len: int, vocab_size: int, packer: str = "auto") -> Dataset:
    """Write documents of these lengths, in tokens, as a dataset; every token but a document's first is a target."""
    plan = make_plan(
        seq_len=seq_len,
        packer=packer,
        loss_mask=False,
        tokenizer={"digest": "0" * 64, "vocab_size": vocab_size, "max_id": vocab_size - 1},
        sources=[make_source("random")],
    )
    store, sidecars, rng, layout = LocalStore(path), [], np.random.default_rng(0), layout_of(plan)
    store.create()
    store.put("plan.json", canonical(plan))
    windows = np.split(lengths, np.flatnonzero(np.diff(np.cumsum(lengths) // WINDOW_TOKENS)) + 1)
    for window, here in enumerate(windows):
        tokens = Documents(
            rng.integers(0, vocab_size, here.sum(), dtype=np.int32),
            np.concatenate([[0], np.cumsum(here)]),
            np.arange(len(here)) + (window << 32),
        )
        segments = cut(here.astype(np.int64), seq_len, "split")
        rows = assemble_rows(tokens, segments, PACKERS[packer](segments.length, seq_len, seed=0), layout)
        counts = empty_counts()
        counts["packs"], counts["segments"] = len(rows), len(segments.length)
        counts["tokens"] = {"read": int(here.sum()), "packed": int(here.sum()), "lost": {}}
        targets, heads = int(rows.num_targets.sum()), len(segments.length) - len(here)  # that cuts made
        counts["targets"] = {"read": targets + heads, "packed": targets, "lost": {"boundary": heads} if heads else {}}
        counts["documents"] |= {"read": len(here), "packed": len(here), "split": int((here > seq_len).sum())}
        sidecar = make_sidecar(
            plan_id=plan_id(plan),
            window=window,
            source="random",
            shard=write_shard(store, layout, plan_id(plan), window, rows),
            counts=counts,
            index=rows.index(layout),
            lengths=length_histogram(here),
            segment_lengths=length_histogram(segments.length),
        )
        store.put(sidecar_name(window), seal(sidecar))
        sidecars.append(sidecar)
    commit(store, plan, sidecars, {}, {})
    return Dataset(path)
