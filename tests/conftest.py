"""Small tokenizers, built on the spot: each fixture is a directory with tokenizer.json and tokenizer_config.json.

`write_dataset` writes a dataset from known rows without a build: what reports say can be checked against the rows.
"""

import json
import os
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from shards.counts import length_histogram
from shards.manifest import commit
from shards.plan import make_plan, make_source, plan_id
from shards.publish import LocalStore, canonical, seal
from shards.schema import layout_of
from shards.sidecar import make_sidecar, sidecar_name
from shards.writer import PackedRows, write_shard

# Proofs about tokenizers are kept between builds; those of a test run neither come from the user nor stay there.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="shardpack-tests-")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps for a while.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Packing puts several documents into one row, so that no token is padding.",
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system question answer one two three four five six seven eight nine ten",
    "Ein Satz auf Deutsch mit Umlauten: äöü. Une phrase en français: à la crème brûlée.",
    "1 2 3 10 100 1000 2024 3.14159 -7 42",
]
OTHER_TEXTS = ["Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt."] * 3
SPECIALS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(directory: Path, tokenizer: Tokenizer, **config: Any) -> str:
    """Write a tokenizer directory and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return str(directory)


def byte_level_bpe(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: SPECIALS get ids 0 to 4, `<think>` and `</think>` come last and are not flagged special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Byte-level BPE, about 400 entries, EOS `</s>`, ChatML template, no BOS added."""
    return write_tokenizer(
        tmp_path_factory.mktemp("tokenizers") / "bytes",
        byte_level_bpe(TRAINING_TEXTS, 400),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def other_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same class and special tokens as `tokenizer_dir`, another vocabulary."""
    return write_tokenizer(
        tmp_path_factory.mktemp("tokenizers") / "other",
        byte_level_bpe(OTHER_TEXTS, 330),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def bos_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Llama-2-like: BPE over characters with byte fallback, `▁` for spaces, `<unk>`, a post-processor that adds BOS."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only: keeps merges short
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*specials, *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXTS, trainer)
    plain = json.loads(tokenizer.to_str())
    plain["pre_tokenizer"] = None
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return write_tokenizer(
        tmp_path_factory.mktemp("tokenizers") / "bos",
        tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
        add_eos_token=False,
    )


@pytest.fixture(scope="session")
def unigram_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Unigram, T5-like: its control tokens stand in the model's own vocabulary; the post-processor adds EOS."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=320, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXTS * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return write_tokenizer(
        tmp_path_factory.mktemp("tokenizers") / "unigram",
        tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


WriteDataset = Callable[..., Path]
Packs = list[list[int]]  # lengths of the segments of each pack


def rows_from(packs: Packs, ids: np.ndarray, mask: np.ndarray, window: int, layout: Any) -> PackedRows:
    """Lay out segments of the given lengths; every segment is a document of its own."""
    segments = np.array([n for pack in packs for n in pack], np.int64)
    counts = np.array([len(pack) for pack in packs], np.int64)
    starts = np.concatenate([[0], np.cumsum(segments)]).astype(np.int64)
    mask[starts[:-1]] = 0
    segment_offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    cu = [np.concatenate([[0], np.cumsum(pack)]) for pack in packs]
    targets = np.array([mask[a:b].sum() for a, b in pairwise(starts)], np.int64)
    per_pack = list(pairwise(segment_offsets))
    return PackedRows(
        token_offsets=starts[segment_offsets],
        segment_offsets=segment_offsets,
        input_ids=ids.astype(layout.token_type.to_pandas_dtype()),
        position_ids=np.concatenate([np.arange(n) for n in segments] or [np.zeros(0)]).astype(np.uint16),
        loss_mask=mask,
        cu_seqlens=np.concatenate(cu or [np.zeros(0)]).astype(np.int32),
        doc_ids=(window << 32) + np.arange(len(segments), dtype=np.int64),
        doc_parts=np.zeros(len(segments), np.int32),
        doc_offsets=np.zeros(len(segments), np.int32),
        start_targets=np.zeros(len(segments), np.uint8),
        num_tokens=np.array([sum(pack) for pack in packs], np.int32),
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
        records = {"kind": "text", "train_on": "auto", "overlong": "split"}
        plan = make_plan(
            seq_len=seq_len,
            seed=seed,
            tokenizer={"digest": "0" * 64, "vocab_size": vocab_size, "max_id": vocab_size - 1},
            sources=[
                make_source(
                    source,
                    records,
                    [
                        {
                            "name": f"{source}.jsonl",
                            "bytes": 1000,
                            "format": "jsonl",
                            "compression": None,
                            "fingerprint": "0",
                        }
                    ],
                )
                for source in sources
            ],
            windows=[[number, [[0, 0, 1000]]] for number in range(len(sources))],
            part_bytes=1 << 20,
        )
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
            gone, targets = sum(drops.values()), int(mask.sum())
            sidecar = make_sidecar(
                plan_id=plan_id(plan),
                window=window,
                source=source,
                shard=write_shard(store, layout, plan_id(plan), window, rows),
                counts={
                    "documents": {
                        "read": len(segments) + len(drops),
                        "packed": len(segments),
                        "split": 0,
                        "truncated": 0,
                        "dropped": dict.fromkeys(drops, 1),
                    },
                    "tokens": {"read": tokens + gone, "packed": tokens, "lost": drops},
                    "targets": {"read": targets, "packed": targets, "lost": {}},
                    "segments": len(segments),
                    "packs": len(packs),
                },
                index=rows.index(layout),
                bound_packs=-(-tokens // seq_len),
                lengths=length_histogram(segments),
                segment_lengths=length_histogram(segments),
                spans=[[0, 0, 1000, 0, len(segments)]],
                input_xxh3="0",
                facts={
                    "stages_s": {"pack": 0.5},
                    "tokenizer": {"engine": "tokenizers", "version": "0", "guard": {"result": "none"}},
                },
            )
            store.put(sidecar_name(window), seal(sidecar))
            sidecars.append(sidecar)
        files = {} if tokenizer is None else {"tokenizer.json": (Path(tokenizer) / "tokenizer.json").read_bytes()}
        for file, content in files.items():
            store.put(f"tokenizer/{file}", content)
        commit(store, plan, sidecars, files, {"workers": 1})
        return tmp_path / name

    return write
