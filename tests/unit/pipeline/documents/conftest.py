"""One tokenizer for the tests of documents."""

import pytest
from tokenizers import Tokenizer

from pipeline.documents.encoder import Encoder


@pytest.fixture(scope="module")
def encoder(tokenizer_dir: str) -> Encoder:
    return Encoder(tokenizer_dir)


@pytest.fixture(scope="module")
def full(tokenizer_dir: str) -> Tokenizer:
    """The tokenizer as users have it: control text becomes control tokens, offsets count characters."""
    return Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")


@pytest.fixture(params=["tokenizer_dir", "other_tokenizer_dir", "bos_tokenizer_dir", "unigram_tokenizer_dir"])
def any_dir(request: pytest.FixtureRequest) -> str:
    """One tokenizer after another: two vocabularies of BPE, one that adds BOS, and Unigram."""
    return str(request.getfixturevalue(request.param))
