"""A conversation as the ChatML template writes it, and how tests make documents of it and of others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.sources.reader import RecordBatch
from pipeline.tokens import Documents
from shards.errors import SourceError

TEMPLATES = Path(__file__).parents[1] / "templates"
USER, SYSTEM, ANSWER = "What is the capital of France?", "You answer in one word.", "Paris."
ASK, REPLY = {"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}
AGAIN, LAST = {"role": "user", "content": "And then?"}, {"role": "assistant", "content": "Sleep for a while"}
TALK = [{"role": "system", "content": SYSTEM}, ASK, REPLY, AGAIN, LAST]
TALK_TEXT = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER}<|im_end|>\n"
    f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n"
    "<|im_start|>assistant\nSleep for a while<|im_end|>\n"
)
ASK_TEXT = f"<|im_start|>user\n{USER}<|im_end|>\n<|im_start|>assistant\n"
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add numbers", "parameters": {"type": "object"}}}
ANSWERS = ("Paris.<|im_end|>", "Sleep for a while<|im_end|>")


def refuse(index: int, reason: str) -> None:
    """Stop at a bad record, as a build does unless it is told to skip."""
    raise SourceError(f"record {index}: {reason}")


def batch(values: list[Any], reject: Callable[[int, str], None] = refuse) -> RecordBatch:
    return RecordBatch(values, np.arange(len(values)), 0, str, reject)


def make(encoder: Encoder, records: list[Any], template: str | None = None, **options: Any) -> Documents:
    text = None if template is None else (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    options = {"kind": "chat", "chat_template": text, **options}
    return DocumentMaker(encoder, RecordOptions(**options)).make(batch(records))[0]


def one(encoder: Encoder, messages: list[Any], template: str, **options: Any) -> tuple[list[int], list[int]]:
    """Return ids and mask of one conversation."""
    record = {"messages": [*messages], **options.pop("record", {})}
    documents = make(encoder, [record], template, **options)
    assert documents.offsets.tolist() == [0, len(documents.input_ids)]
    ids = documents.input_ids.tolist()
    return ids, targets(documents)


def targets(documents: Documents) -> list[int]:
    """Return the mask of one document as a pack has it: its first token is no target."""
    return [0, *documents.mask_of(1, len(documents.input_ids)).tolist()]


def expected(full: Tokenizer, text: str, *answers: str) -> tuple[list[int], list[int]]:
    """Encode a text as a whole and mark the tokens that touch the answers, found one after another in it."""
    encoding = full.encode(text, add_special_tokens=False)
    mask, position = np.zeros(len(encoding.ids), int), 0
    for answer in answers:
        start = text.index(answer, position)
        position = start + len(answer)
        mask |= [first < position and last > start for first, last in encoding.offsets]
    mask[0] = 0
    return encoding.ids, mask.tolist()
