"""Token ids of which nobody brings the tokenizer: all that is known of what they mean is how many there are."""

import hashlib

import orjson

from pipeline.documents.tokenizer import TokenizerImage, TokenizerSpec

NO_TEXT = orjson.dumps({"model": {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}, "added_tokens": []})
"A tokenizer.json that knows no text, since encoders are made of one: records of token ids are never encoded."


def spec_of_size(vocab_size: int) -> TokenizerSpec:
    """Return what stands for the tokenizer of ids below `vocab_size`; it names no EOS, padding or control token."""
    return TokenizerSpec(
        digest=hashlib.sha256(f"ids below {vocab_size}".encode()).hexdigest(),
        vocab_size=vocab_size,
        max_id=vocab_size - 1,
        bos_id=None,
        eos_id=None,
        pad_id=None,
        prefix_ids=(),
        suffix_ids=(),
    )


def no_text_image(spec: TokenizerSpec) -> TokenizerImage:
    """Return what the encoder of a build is made of that encodes nothing."""
    return TokenizerImage(spec=spec, content=NO_TEXT, unknown_id=None)
