"""Whatever people and models say: each trained answer stands in exactly the text that its template shows before it.

The definition is transformers' own rendering. A document ends in `messages[:k + 1]` for its last trained answer k; for
each trained answer j of it, the text up to the answer's end is `messages[:j + 1]`, and the targets are the answer and
its end mark, white space that the template trims and blocks that it wrote itself left out.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.sources.reader import RecordBatch
from pipeline.tokens import Documents

TEMPLATES = Path(__file__).parents[1] / "templates"
NAMES = ("chatml", "closes", "deepseek", "gemma", "harmony", "llama", "marked", "qwen", "thinking", "trims")
WORDS = st.sampled_from(
    ["Paris", " is", " a", "\n", "\n\n", "   ", "1000", "é", "한", "👍\u200d", ".", "<", "|im", "\t"]
)
CONTENT = st.lists(WORDS, max_size=7).map("".join)
END_MARKS = ("<|im_end|>", "</s>")
EMPTY_BLOCK = "<think>\n\n</think>\n\n"


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, str]]:
    """Conversations with one question before each answer, which every template takes, and perhaps a system prompt."""
    system = [{"role": "system", "content": draw(CONTENT)}] if draw(st.booleans()) else []
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        turns += [{"role": "user", "content": draw(CONTENT)}, {"role": "assistant", "content": draw(CONTENT)}]
    return [*system, *turns, *([{"role": "user", "content": draw(CONTENT)}] if draw(st.booleans()) else [])]


@pytest.fixture(scope="module")
def encoder(tokenizer_dir: str) -> Encoder:
    return Encoder(tokenizer_dir)


@pytest.fixture(scope="module")
def full(tokenizer_dir: str) -> Tokenizer:
    return Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")


def rendered(name: str, messages: list[Any], prompt: bool = False) -> str:
    text = (
        (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return render_jinja_template([messages], chat_template=text, add_generation_prompt=prompt, **tokens)[0][0]


def made(maker: DocumentMaker, records: list[Any]) -> tuple[Documents, dict[int, str]]:
    rejected: dict[int, str] = {}
    batch = RecordBatch(records, np.arange(len(records)), 0, str, rejected.__setitem__)
    return maker.make(batch)[0], rejected


def is_beginning(name: str, alone: str, text: str) -> bool:
    """Whether `text` goes on from `alone`; one template closes every rendering with EOS."""
    return text.startswith(alone.removesuffix("</s>") if name == "closes" else alone)


def answers_of(talk: list[dict[str, str]]) -> list[int]:
    return [index for index, message in enumerate(talk) if message["role"] == "assistant"]


def wanted_documents(name: str, talk: list[dict[str, str]]) -> list[tuple[str, list[int]]]:
    """Return text and trained answers of each document: one where all texts begin alike, else by runs that do."""
    answers = answers_of(talk)
    whole, cut = rendered(name, talk), [(k, rendered(name, talk[: k + 1])) for k in answers]
    prompts = [rendered(name, talk[:k], prompt=True) for k in answers]
    if name == "marked" or all(is_beginning(name, text, whole) for text in [text for _, text in cut] + prompts):
        return [(whole, answers)]
    documents: list[tuple[str, list[int]]] = []
    for k, text in cut:
        if documents and is_beginning(name, documents[-1][0], text):
            documents[-1] = (text, [*documents[-1][1], k])
        else:
            documents.append((text, [k]))
    return documents


def wanted_mask(name: str, text: str, talk: list[dict[str, str]], answers: list[int], full: Tokenizer) -> list[int]:
    """Mark the tokens of a document that touch an answer: from its prompt on, to its end mark."""
    encoding = full.encode(text, add_special_tokens=False)
    mask = np.zeros(len(encoding.ids), int)
    for k in answers:
        start, alone = len(rendered(name, talk[:k], prompt=True)), rendered(name, talk[: k + 1])
        if text[start:].startswith(EMPTY_BLOCK):
            start += len(EMPTY_BLOCK)
        stop = len((alone if text.startswith(alone) else alone.removesuffix("</s>")).rstrip())
        assert text[:stop].endswith(END_MARKS)
        mask |= [first < stop and last > start for first, last in encoding.offsets]
    return mask.tolist()


@cache
def maker_of(encoder: Encoder, name: str, unroll: str) -> DocumentMaker:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return DocumentMaker(encoder, RecordOptions(kind="chat", chat_template=text, unroll=unroll, add_eos=False))


def fresh(maker: DocumentMaker) -> DocumentMaker:
    """Return a maker that has seen no conversation."""
    for renderer in maker.renderers.values():
        renderer.layouts.clear()
    return maker


@given(talk=talks(), name=st.sampled_from(NAMES))
def test_each_document_is_what_the_template_shows_at_its_last_answer(encoder, full, talk, name):
    documents, rejected = made(maker_of(encoder, name, "auto"), [{"messages": talk}])
    assert not rejected
    wanted = wanted_documents(name, talk)
    found = [documents.input_ids[start:stop].tolist() for start, stop in pairwise(documents.offsets)]
    assert found == [full.encode(text, add_special_tokens=False).ids for text, _ in wanted]
    for (start, stop), (text, answers) in zip(pairwise(documents.offsets), wanted, strict=True):
        assert documents.mask_of(start, stop).tolist() == wanted_mask(name, text, talk, answers, full)
    lasts = [answers[-1] for _, answers in wanted] if len(wanted) > 1 else []
    assert (documents.doc_parts is None) == (not lasts)
    assert documents.doc_parts is None or documents.doc_parts.tolist() == lasts


@given(
    batch=st.lists(talks(), min_size=2, max_size=12),
    name=st.sampled_from(NAMES),
    unroll=st.sampled_from(["auto", "always"]),
)
def test_what_came_before_a_conversation_changes_nothing_in_it(encoder, batch, name, unroll):
    """Layouts carry what was learnt from one conversation to the next."""
    maker = maker_of(encoder, name, unroll)
    together, _ = made(fresh(maker), [{"messages": talk} for talk in batch])
    for index, talk in enumerate(batch):
        alone, _ = made(fresh(maker), [{"messages": talk}])
        its = np.flatnonzero(together.doc_ids == index)
        assert len(its) == len(alone.doc_ids)
        start, stop = together.offsets[its[0]], together.offsets[its[-1] + 1]
        assert together.input_ids[start:stop].tolist() == alone.input_ids.tolist()
        assert together.mask_of(start, stop).tolist() == alone.mask_of(0, len(alone.input_ids)).tolist()


@given(talk=talks(), name=st.sampled_from(NAMES))
def test_always_gives_every_answer_a_document_of_its_own(encoder, full, talk, name):
    documents, rejected = made(maker_of(encoder, name, "always"), [{"messages": talk}])
    assert not rejected
    texts = [rendered(name, talk[: k + 1]) for k in answers_of(talk)]
    found = [documents.input_ids[start:stop].tolist() for start, stop in pairwise(documents.offsets)]
    assert found == [full.encode(text, add_special_tokens=False).ids for text in texts]
    for (start, stop), text, k in zip(pairwise(documents.offsets), texts, answers_of(talk), strict=True):
        assert documents.mask_of(start, stop).tolist() == wanted_mask(name, text, talk, [k], full)
