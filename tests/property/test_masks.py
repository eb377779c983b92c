"""However conversations are cut, packed and shuffled, each target keeps its own context and no other."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.packing.cutting import cut
from pipeline.packing.packers import PACKERS
from pipeline.packing.rows import assemble_rows
from pipeline.sources.reader import RecordBatch
from shards.schema import Layout

SEQ_LEN = 64
TEMPLATES = Path(__file__).parents[1] / "templates"
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
WORDS = st.sampled_from(
    ["Paris", " capital", " of", "\n", "\n\n", "  ", "1000", "é", "한", "👍\u200d", ".", " the", "<", "|im", "\t"]
)
MESSAGES = st.lists(st.tuples(ROLES, st.lists(WORDS, max_size=9).map("".join)), min_size=1, max_size=6)
Pairs = Counter[tuple[tuple[int, ...], int]]


class Conversation:
    """A conversation as the ChatML template writes it, built from the definition alone."""

    def __init__(self, messages: list[tuple[str, str]], full: Tokenizer) -> None:
        text, answers, ends = "", [], []
        for role, content in messages:
            text += f"<|im_start|>{role}\n"
            start = len(text)
            text += f"{content}<|im_end|>\n"
            answers += [(start, len(text) - 1)] if role == "assistant" else []
            ends.append(len(text))
        encoding = full.encode(text)
        self.ids = encoding.ids
        self.targets = [
            place > 0 and any(first < stop and last > start for start, stop in answers)
            for place, (first, last) in enumerate(encoding.offsets)
        ]
        self.turn_ends = [sum(last <= end for _, last in encoding.offsets) for end in ends]
        self.questions = [end for end, (role, _) in zip(self.turn_ends, messages[1:], strict=False) if role == "user"]

    def pairs(self, start: int, stop: int) -> Pairs:
        """Return the (context, target) pairs of a piece; its first token has no context, so it is no target."""
        stop = min(stop, len(self.ids))
        return Counter(
            (tuple(self.ids[start:place]), self.ids[place]) for place in range(start + 1, stop) if self.targets[place]
        )

    def kept(self, policy: str, side: str) -> list[tuple[int, int]]:
        """Return the pieces that a length policy keeps."""
        size = len(self.ids)
        if policy == "split":
            return [(start, start + SEQ_LEN) for start in range(0, size, SEQ_LEN)]
        if size <= SEQ_LEN:
            return [(0, size)]
        if policy == "drop":
            return []
        if policy == "truncate":
            return [(0, SEQ_LEN)] if side == "right" else [(size - SEQ_LEN, size)]
        if side == "right":
            return [(0, max((end for end in self.turn_ends if end <= SEQ_LEN), default=0))]
        return [(min((begin for begin in self.questions if size - begin <= SEQ_LEN), default=size), size)]


@pytest.fixture(scope="module")
def encoder(tokenizer_dir: str) -> Encoder:
    return Encoder(tokenizer_dir)


@pytest.fixture(scope="module")
def full(tokenizer_dir: str) -> Tokenizer:
    return Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")


def refuse(index: int, reason: str) -> None:
    raise AssertionError(f"record {index}: {reason}")


def packed_pairs(encoder: Encoder, records: list[Any], options: RecordOptions, packer: str, seed: int) -> Pairs:
    """Take records through documents, cutting, packing and gathering, and read the pairs off the packs."""
    batch = RecordBatch(records, np.arange(len(records)), 0, str, refuse)
    documents, _ = DocumentMaker(encoder, options).make(batch)
    turns = {"turn_ends": documents.turn_ends, "turn_offsets": documents.turn_offsets}
    lengths = np.diff(documents.offsets)
    segments = cut(lengths, SEQ_LEN, options.overlong_policy, truncate_side=options.truncate_side, **turns)
    bins = PACKERS[packer](segments.length, SEQ_LEN, seed=seed)
    rows = assemble_rows(documents, segments, bins, Layout(seq_len=SEQ_LEN, max_token_id=encoder.spec.max_id))
    pairs: Pairs = Counter()
    for row, (first, last) in enumerate(pairwise(rows.token_offsets.tolist())):
        ids, targets = rows.input_ids[first:last].tolist(), rows.loss_mask[first:last].tolist()
        begin = int(rows.segment_offsets[row]) + row
        borders = rows.cu_seqlens[begin : int(rows.segment_offsets[row + 1]) + row + 1].tolist()
        for start, stop in pairwise(borders):
            pairs.update((tuple(ids[start:place]), ids[place]) for place in range(start, stop) if targets[place])
    return pairs


@given(
    talks=st.lists(MESSAGES, min_size=1, max_size=8),
    template=st.sampled_from(["chatml", "marked"]),
    policy=st.sampled_from(["split", "drop", "truncate", "truncate-turns"]),
    side=st.sampled_from(["right", "left"]),
    packer=st.sampled_from(sorted(PACKERS)),
    seed=st.integers(0, 9),
)
def test_targets_keep_their_contexts_but_for_what_the_policy_loses(
    encoder, full, talks, template, policy, side, packer, seed
):
    chosen = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    options = RecordOptions(kind="chat", chat_template=chosen, overlong=policy, truncate_side=side)
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    conversations = [Conversation(talk, full) for talk in talks]
    wanted: Pairs = sum(
        (talk.pairs(*piece) for talk in conversations for piece in talk.kept(policy, side)), start=Counter()
    )
    assert packed_pairs(encoder, records, options, packer, seed) == wanted


def test_the_property_is_not_about_nothing(encoder, full):
    talk = [("user", "the capital of France"), ("assistant", "Paris." * 20)]
    conversation = Conversation(talk, full)
    assert len(conversation.ids) > SEQ_LEN
    assert conversation.pairs(0, SEQ_LEN).total() > 20
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]}]
    kept = packed_pairs(encoder, records, RecordOptions(kind="chat", overlong="truncate"), "ffd", 0)
    assert kept == conversation.pairs(0, SEQ_LEN)
