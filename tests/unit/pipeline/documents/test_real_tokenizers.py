"""Real tokenizers and their own templates, where they are installed.

SHARDPACK_TOKENIZERS names a folder that is searched for tokenizer.json; without it these tests are skipped. None of the
files belongs into the repository: their licences are their owners'.
"""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.documents.masked_encoding import ChunkEncoder
from pipeline.documents.messages import chat_conversation
from pipeline.sources.reader import RecordBatch
from shards.errors import SourceError

FOLDER = os.environ.get("SHARDPACK_TOKENIZERS", "")
FOUND = sorted(path.parent for path in Path(FOLDER).rglob("tokenizer.json")) if FOLDER else []
ASK = {"role": "user", "content": "Où est-ce?\n\n 한국어 123456 \u00a0 it's e\u0301 👩\u200d👧\n"}
REPLY = {"role": "assistant", "content": "À Paris,\tdepuis 1000 ans.\n\n```py\nx  = {'a': [1]}\n```"}
AGAIN = {"role": "user", "content": "<|not a token|> And then? «…»"}
TALKS = [[ASK, REPLY], [ASK, REPLY | {"content": "Yes."}, AGAIN, REPLY]]
pytestmark = pytest.mark.skipif(not FOUND, reason="SHARDPACK_TOKENIZERS names no folder with a tokenizer.json")


@pytest.fixture(scope="module", params=FOUND, ids=[path.parent.name for path in FOUND])
def folder(request):
    return request.param


@pytest.fixture(scope="module")
def encoder(folder):
    return Encoder(folder)


@pytest.fixture(scope="module")
def full(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def render(encoder, messages):
    from transformers.utils.chat_template_utils import render_jinja_template

    spec = encoder.spec
    return render_jinja_template([messages], chat_template=spec.chat_template, **spec.special_tokens)[0][0]


def refuse(index: int, reason: str) -> None:
    raise SourceError(f"record {index}: {reason}")


@pytest.mark.parametrize("talk", TALKS, ids=["one turn", "two turns"])
def test_a_conversation_gives_the_ids_of_the_whole_text_and_an_exact_mask(encoder, full, talk):
    if encoder.spec.chat_template is None:
        pytest.skip("no chat template")
    batch = RecordBatch([{"messages": talk}], np.arange(1), 0, str, refuse)
    options = RecordOptions(kind="chat", add_eos=False)
    text = render(encoder, talk)
    if not text.startswith(render(encoder, talk[:2])):
        with pytest.raises(SourceError, match="rewrites earlier turns"):
            DocumentMaker(encoder, options).make(batch)
        options = RecordOptions(kind="chat", add_eos=False, train_on="last-assistant")
    documents, _ = DocumentMaker(encoder, options).make(batch)
    encoding = full.encode(text, add_special_tokens=False)
    assert documents.input_ids.tolist() == encoding.ids
    control, mask, position = set(encoder.spec.added.values()), np.zeros(len(encoding.ids), int), 0
    for message in talk:
        start = text.index(message["content"].strip(), position)
        position = start + len(message["content"].strip())
        last = next(i for i, span in enumerate(encoding.offsets) if span[0] >= position and encoding.ids[i] in control)
        if message["role"] == "assistant" and (options.train_on == "auto" or message is talk[-1]):
            mask[: last + 1] |= [stop > start for _, stop in encoding.offsets[: last + 1]]
    assert documents.loss_mask[1:].tolist() == mask[1:].tolist()


def test_borders_from_ids_are_those_of_the_offsets(encoder):
    chunks = ChunkEncoder(encoder)
    conversation = chat_conversation({"messages": [ASK, REPLY, AGAIN]}, RecordOptions(kind="chat"))
    for message in conversation.messages:
        text = message["content"]
        ids, spans = encoder.encode_with_spans(text)
        for point in range(len(text) + 1):
            starts, stops, (at,) = chunks.token_offsets(text, ids, [point], begins=True)
            assert (stops > at).tolist() == (spans[:, 1] > point).tolist()
            assert (starts < at).tolist() == (spans[:, 0] < point).tolist()


def test_prefixes_of_a_batch_do_not_change_its_ids(encoder):
    texts = [message["content"] for message in (ASK, REPLY, AGAIN)]
    ids, offsets = encoder.encode(texts)
    parts = [ids[start:stop].tolist() for start, stop in pairwise(offsets.tolist())]
    assert parts == [encoder.encode_with_spans(text)[0].tolist() for text in texts]
