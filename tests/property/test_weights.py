"""No weight is lost: whatever cutting, packing and repacking do, each token keeps the weight that it came with."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline import BuildConfig, RecordOptions, build
from pipeline.building.repacking.repack import repack
from pipeline.config import RepackConfig
from shards import Dataset, verify

VOCAB_SIZE = 50
WEIGHTS = st.one_of(
    st.just(0.0), st.just(1.0), st.sampled_from([0.1, 0.5, 2.0, 1e-3, 60000.0]), st.floats(2**-14, 65504, width=16)
)
TOKEN = st.tuples(st.integers(0, VOCAB_SIZE - 1), WEIGHTS)
DOCUMENTS = st.lists(st.lists(TOKEN, min_size=1, max_size=40), min_size=1, max_size=12)
Weighed = dict[int, list[tuple[int, float]]]


def weighed(dataset: Dataset) -> Weighed:
    """Ids and weights of each document's tokens, put together from rows; NaN where a cut would have lost a weight."""
    found: dict[int, dict[int, tuple[int, float]]] = {}
    for row in dataset:
        bounds = row["cu_seqlens"].tolist()
        for place, (start, stop) in enumerate(pairwise(bounds)):
            offset = int(row["doc_offsets"][place])
            tokens = found.setdefault(int(row["doc_ids"][place]), {})
            for at in range(start, stop):
                hidden = at == start  # nothing predicts a segment's first token: its weight stands beside the row
                weight = row["start_weights"][place] if hidden else row["loss_weights"][at]
                tokens[offset + at - start] = (int(row["input_ids"][at]), float(weight))
    return {number: [tokens.get(at, (-1, np.nan)) for at in range(max(tokens) + 1)] for number, tokens in found.items()}


@given(
    documents=DOCUMENTS,
    lengths=st.tuples(st.integers(2, 24), st.integers(2, 24)),
    packer=st.sampled_from(["auto", "wrapped"]),
)
def test_every_token_keeps_its_weight_through_cuts_packs_and_repacking(documents, lengths, packer):
    expected: Weighed = {}
    for number, document in enumerate(documents):
        pairs = [(token, float(np.float16(weight))) for token, weight in document]
        expected[number] = [(pairs[0][0], 0.0), *pairs[1:]]  # nothing ever predicts a document's first token
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        lines = [{"input_ids": [t for t, _ in each], "w": [w for _, w in each]} for each in documents]
        corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
        records = RecordOptions(kind="tokens", weights_field="w", overlong="split", keep_no_target=True)
        build(
            BuildConfig(
                sources=corpus, out=f"{folder}/0", vocab_size=VOCAB_SIZE, seq_len=lengths[0], packer=packer,
                records=records,
            )
        )  # fmt: skip
        repack(RepackConfig(dataset=f"{folder}/0", out=f"{folder}/1", seq_len=lengths[1], packer="ffd"))
        repack(RepackConfig(dataset=f"{folder}/1", out=f"{folder}/2", seq_len=lengths[0], packer=packer))
        for path in (f"{folder}/{step}" for step in range(3)):
            dataset = Dataset(path)
            assert weighed(dataset) == expected
            assert dataset.index.weight_sum is not None
            hidden = sum(float(row["start_weights"].astype(np.float64).sum()) for row in dataset)
            total = sum(weight for document in expected.values() for _, weight in document)
            assert np.isclose(dataset.index.weight_sum.sum() + hidden, total)
            assert verify(path).ok
        assert Dataset(f"{folder}/0").dataset_id == Dataset(f"{folder}/2").dataset_id
