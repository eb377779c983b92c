"""Small datasets of random documents and tiny models, for every test of the trainer."""

import json
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest

import trainer.loop
from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.packing.rows import assemble_rows
from pipeline.tokens import Documents
from shards import Dataset
from shards.counts import empty_counts, length_histogram
from shards.manifest import commit
from shards.plan import make_plan, make_source, plan_id
from shards.publish import LocalStore, canonical
from shards.schema import layout_of
from shards.sidecar import make_sidecar
from shards.writer import write_shard
from trainer import TrainConfig, TrainResult, train

VOCAB = 97

Document = tuple[list[int], list[int]]
"Ids, and which of them are targets."


def random_documents(number: int, longest: int, seed: int = 0, shortest: int = 2) -> list[Document]:
    """Documents of random lengths; low ids are frequent, so there is something to learn; two thirds are targets."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in rng.integers(shortest, longest + 1, number):
        mask = (rng.random(length) < 0.67).astype(int)
        mask[0], mask[-1] = 0, 1
        documents.append(((VOCAB * rng.random(length) ** 3).astype(int).tolist(), mask.tolist()))
    return documents


def write_dataset(
    path: Path,
    sources: dict[str, list[Document]],
    seq_len: int,
    packer: str = "ffd",
    max_id: int = VOCAB - 1,
    weigh: Callable[[int], np.ndarray] | None = None,
) -> Dataset:
    """Write a finished dataset, one window for each source; `weigh` gives the weights of that many tokens."""
    plan = make_plan(
        seq_len=seq_len,
        packer=packer,
        tokenizer={"digest": "0" * 64, "vocab_size": max_id + 1, "max_id": max_id},
        sources=[make_source(name) for name in sources],
        loss_weights=weigh is not None,
    )
    store = LocalStore(path)
    store.create()
    store.put("plan.json", canonical(plan))
    layout, sidecars = layout_of(plan), []
    for window, (name, documents) in enumerate(sources.items()):
        lengths = np.array([len(ids) for ids, _ in documents], np.int64)
        tokens = Documents(
            input_ids=np.concatenate([ids for ids, _ in documents]).astype(np.int32),
            loss_mask=np.concatenate([mask for _, mask in documents]).astype(np.uint8),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            doc_ids=np.arange(len(documents), dtype=np.int64) + (window << 32),
        )
        if weigh is not None:
            weights = (weigh(len(tokens.input_ids)) * tokens.loss_mask).astype(np.float16)
            tokens = tokens._replace(loss_weights=weights, loss_mask=(weights > 0).astype(np.uint8))
        segments = cut(lengths, seq_len, "split")
        rows = assemble_rows(tokens, segments, PACKERS[packer](segments.length, seq_len, seed=0), layout)
        counts = empty_counts()
        counts["packs"], counts["segments"] = len(rows), len(segments.length)
        counts["tokens"] = {"read": int(lengths.sum()), "packed": int(lengths.sum()), "lost": {}}
        sidecar = make_sidecar(
            plan_id=plan_id(plan),
            window=window,
            source=name,
            shard=write_shard(store, layout, plan_id(plan), window, rows),
            counts=counts,
            index=rows.index(layout),
            lengths=length_histogram(lengths),
            segment_lengths=length_histogram(segments.length),
        )
        sidecars.append(sidecar)
    commit(store, plan, sidecars, {}, {})
    return Dataset(path)


MODELS = {
    "llama": {"model_type": "llama", "num_key_value_heads": 1},
    "mistral-window": {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 5},
}


@pytest.fixture
def model_config(tmp_path: Path) -> Callable[..., str]:
    """Write the configuration of a tiny model and return its path."""

    def write(kind: str = "llama", **extra: object) -> str:
        config = {
            "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
        }  # fmt: skip
        path = tmp_path / f"{kind}-{len(list(tmp_path.glob('*.json')))}.json"
        path.write_text(json.dumps(config | MODELS[kind] | extra))
        return str(path)

    return write


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Sixty documents of 2 to 40 tokens in packs of 48."""
    return write_dataset(tmp_path / "dataset", {"main": random_documents(60, 40)}, 48)


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Dataset]:
    """Write a dataset from documents by source; the packer, if not ffd, last."""

    def make(
        sources: dict[str, list[Document]],
        seq_len: int,
        packer: str = "ffd",
        name: str = "made",
        weigh: Callable[[int], np.ndarray] | None = None,
    ) -> Dataset:
        return write_dataset(tmp_path / f"{name}-{packer}", sources, seq_len, packer, weigh=weigh)

    return make


@pytest.fixture
def documents() -> Callable[..., list[Document]]:
    """Random documents; see `random_documents`."""
    return random_documents


@pytest.fixture
def best_step(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the evaluations of a run be best at this step, one that is not kept anyway, on any machine's arithmetic."""
    losses = chain([5.0, 4.0, 3.0, 3.5, 4.0, 4.5, 5.0], repeat(5.5))
    monkeypatch.setattr(trainer.loop, "evaluate_all", lambda *_, **__: {"eval_loss": next(losses), "eval_targets": 1})
    return 3


SETTINGS = {
    "steps": 4, "packs_per_step": 4, "lr": 1e-2, "dtype": "fp32", "log_every": 1, "device": "cpu", "progress": False,
}  # fmt: skip


class MetricLines(list[dict]):
    """The lines of a run's metrics.jsonl."""

    def column(self, key: str) -> list[float]:
        """Return a figure of every line that has it."""
        return [line[key] for line in self if key in line]


@pytest.fixture
def run(
    dataset: Dataset, model_config: Callable[..., str], tmp_path: Path
) -> Callable[..., tuple[TrainResult, MetricLines]]:
    """Train on the small dataset and return the result and the lines of metrics; fields as in TrainConfig."""
    model = model_config()

    def start(name: str = "run", **fields: object) -> tuple[TrainResult, MetricLines]:
        chosen = {"dataset": str(dataset.path), "model": model, "out": str(tmp_path / name), **SETTINGS, **fields}
        result = train(TrainConfig(**chosen))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return result, MetricLines(map(json.loads, lines))

    return start
