"""Datasets written from known rows, without a build: what reports say can be checked against the rows themselves."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards.manifest import commit, empty_counts, length_histogram, sidecar_name
from shards.plan import plan_id
from shards.publish import LocalStore, canonical, seal
from shards.schema import FORMAT, VERSION, layout_of
from shards.writer import Rows, encode_index, write_shard

WriteDataset = Callable[..., Path]
Packs = list[list[int]]  # lengths of the segments of each pack


def rows_from(packs: Packs, ids: np.ndarray, mask: np.ndarray, window: int, layout: Any) -> Rows:
    """Lay out segments of the given lengths; every segment is a document of its own."""
    segments = np.array([n for pack in packs for n in pack], np.int64)
    counts = np.array([len(pack) for pack in packs], np.int64)
    starts = np.concatenate([[0], np.cumsum(segments)]).astype(np.int64)
    mask[starts[:-1]] = 0
    segment_offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    cu = [np.concatenate([[0], np.cumsum(pack)]) for pack in packs]
    targets = np.array([mask[a:b].sum() for a, b in pairwise(starts)], np.int64)
    per_pack = list(pairwise(segment_offsets))
    return Rows(
        token_offsets=starts[segment_offsets],
        segment_offsets=segment_offsets,
        input_ids=ids.astype(layout.token_type.to_pandas_dtype()),
        position_ids=np.concatenate([np.arange(n) for n in segments] or [np.zeros(0)]).astype(np.uint16),
        loss_mask=mask,
        cu_seqlens=np.concatenate(cu or [np.zeros(0)]).astype(np.int32),
        doc_ids=(window << 32) + np.arange(len(segments), dtype=np.int64),
        doc_offsets=np.zeros(len(segments), np.int32),
        max_seqlen=np.array([max(pack) for pack in packs], np.int32),
        num_targets=np.array([targets[a:b].sum() for a, b in per_pack], np.int32),
        num_target_segments=np.array([(targets[a:b] > 0).sum() for a, b in per_pack], np.int32),
        attention_pairs=np.array([sum(n * (n + 1) // 2 for n in pack) for pack in packs], np.int64),
    )


@pytest.fixture
def write_dataset(tmp_path: Path) -> WriteDataset:
    """Write `{source: packs}`, one window a source; `lost` adds entries to a source's balance sheet."""

    def write(
        sources: dict[str, Packs],
        *,
        seq_len: int = 64,
        name: str = "dataset",
        lost: dict[str, dict[str, int]] | None = None,
        tokenizer: Path | None = None,
        vocab_size: int = 300,
        seed: int = 0,
    ) -> Path:
        rng = np.random.default_rng(seed)
        plan = {
            "format": FORMAT,
            "version": VERSION,
            "recipe": 1,
            "seq_len": seq_len,
            "seed": seed,
            "position_ids": True,
            "packer": {"name": "auto", "max_segments": None},
            "on_error": "fail",
            "tokenizer": {"digest": "0" * 64, "vocab_size": vocab_size, "max_id": vocab_size - 1},
            "sources": [
                {
                    "name": source,
                    "records": {"kind": "text", "train_on": "auto", "overlong": "split"},
                    "files": [{"name": f"{source}.jsonl", "bytes": 1000, "fingerprint": "0"}],
                }
                for source in sources
            ],
            "windows": [[number, [[0, 0, 1000]]] for number in range(len(sources))],
            "part_bytes": 1 << 20,
        }
        store, layout = LocalStore(tmp_path / name), layout_of(plan)
        store.create()
        store.put("plan.json", canonical(plan))
        sidecars = []
        for window, (source, packs) in enumerate(sources.items()):
            segments = np.array([n for pack in packs for n in pack], np.int64)
            tokens = int(segments.sum())
            mask = (rng.random(tokens) < 0.7).astype(np.uint8)
            rows = rows_from(packs, rng.integers(0, min(vocab_size, 250), tokens), mask, window, layout)
            drops = (lost or {}).get(source, {})
            gone = sum(drops.values())
            counts = empty_counts()
            counts["documents"] |= {"read": len(segments) + len(drops), "packed": len(segments)}
            counts["documents"]["dropped"] = dict.fromkeys(drops, 1)
            counts["tokens"] |= {"read": tokens + gone, "packed": tokens, "lost": drops}
            counts["targets"] |= {"read": int(mask.sum()), "packed": int(mask.sum())}
            counts |= {"segments": len(segments), "packs": len(packs)}
            sidecar = {
                "format": FORMAT,
                "version": VERSION,
                "plan_id": plan_id(plan),
                "window": window,
                "source": source,
                "shard": write_shard(store, layout, plan_id(plan), window, rows),
                "counts": counts,
                "bound_packs": -(-tokens // seq_len),
                "lengths": length_histogram(segments),
                "segment_lengths": length_histogram(segments),
                "longest": [],
                "spans": [[0, 0, 1000, 0, len(segments)]],
                "input_xxh3": "0",
                "rejected": [],
                "index": encode_index(rows.index()),
                "facts": {
                    "stages_s": {"pack": 0.5},
                    "tokenizer": {"engine": "tokenizers", "version": "0", "guard": {"result": "none"}},
                },
            }
            store.put(sidecar_name(window), seal(sidecar))
            sidecars.append(sidecar)
        files = {} if tokenizer is None else {"tokenizer.json": (Path(tokenizer) / "tokenizer.json").read_bytes()}
        for file, content in files.items():
            store.put(f"tokenizer/{file}", content)
        commit(store, plan, sidecars, files, {"workers": 1})
        return tmp_path / name

    return write
