"""Samples: how the model goes on from given prompts while it trains, taking the likeliest token each time.

Prompts lie end to end in one row, each with room for what is written, so boundaries and shapes stay the same from the
first token to the last. Causal layers do not see the room behind the token that they are at, so no cache is kept, and
every kind of model that trains packed is sampled alike. A token costs a forward pass over the row:

    row          p p p . . | q q . .       two prompts of 3 and 2 tokens, 2 tokens to write
    first pass   reads the logits at the last p and the last q, and fills the first dots
    second pass  reads them one place further, and fills the others

No random number is drawn, so a run with samples is the run without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shards import Dataset
from shards.errors import PackError, reason_of
from trainer.metrics import Sample
from trainer.model.loss import PackedLM, unwrap
from trainer.saving.export import trained_end_ids


class Prompt(NamedTuple):
    """A prompt as a person reads it, and as the model does."""

    text: str
    ids: list[int]


class Sampler:
    """The prompts of a run, and how to go on from them.

    Args:
        file: A text file with a prompt in each line, or JSONL whose lines have a `prompt` or `messages`.
        dataset: Whose tokenizer and chat template make the ids.
        tokens: Tokens to write after each prompt, at most.
        tokens_per_batch: Tokens in a row, at least the dataset's `seq_len`.

    Raises:
        PackError: The file cannot be read, a prompt is too long, or the dataset has no tokenizer.
    """

    def __init__(self, file: Path, dataset: Dataset, *, tokens: int, tokens_per_batch: int) -> None:
        self.tokens, self.tokens_per_batch = tokens, tokens_per_batch
        self._tokenizer = _load_tokenizer(dataset)
        self._trained_ends = trained_end_ids(dataset)
        prefix = dataset.plan["tokenizer"].get("prefix_ids") or []
        self.prompts = []
        for where, record in read_prompts(file):
            if "messages" in record:
                text, before = _render(record["messages"], dataset, where), []
            else:
                text, before = record["prompt"], prefix  # of a text; a template writes its own
            ids = [*before, *self._tokenizer.encode(text, add_special_tokens=False).ids]
            if not 1 <= len(ids) <= dataset.seq_len - tokens:
                raise PackError(
                    f"{where}: the prompt has {len(ids):,} tokens; expected 1 to {dataset.seq_len - tokens:,}, the "
                    f"dataset's seq_len without the {tokens:,} to write. Shorten it, or lower `sample_tokens`."
                )
            self.prompts.append(Prompt(text, ids))

    def sample(
        self, module: nn.Module, lm: PackedLM, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> list[Sample]:
        """Go on from every prompt; every process of a run calls this.

        Args:
            module: What to call: `lm`, or `lm` inside DDP or FSDP2.
            autocast: Makes the context in which forward runs.
        """
        known = unwrap(lm.model).generation_config.eos_token_id
        ends = {*self._trained_ends, *([known] if isinstance(known, int) else known or [])}
        module.eval()
        written: list[list[int]] = []
        for row in self._rows(one_by_one=lm.backend is None):
            with torch.no_grad(), autocast():
                ids = continue_prompts(module, [prompt.ids for prompt in row], self.tokens, device)
            written += ids.tolist()
        if isinstance(module, FSDPModule):
            module.reshard()  # no backward pass does it here, as after an evaluation
        module.train()
        texts = self._tokenizer.decode_batch([_until(ids, ends) for ids in written], skip_special_tokens=False)
        return [{"prompt": prompt.text, "text": text} for prompt, text in zip(self.prompts, texts, strict=True)]

    def _rows(self, one_by_one: bool) -> Iterator[list[Prompt]]:
        row: list[Prompt] = []
        length = 0
        for prompt in self.prompts:
            room = len(prompt.ids) + self.tokens
            if row and (one_by_one or length + room > self.tokens_per_batch):
                yield row
                row, length = [], 0
            row.append(prompt)
            length += room
        yield row


def continue_prompts(module: nn.Module, prompts: list[list[int]], tokens: int, device: torch.device) -> Tensor:
    """Write after each prompt the likeliest token, again and again.

    All prompts go on to the end: processes that stopped at different tokens would wait for each other forever.

    Returns:
        int64 (prompts, tokens), on the CPU.
    """
    rooms = [len(ids) + tokens for ids in prompts]
    row = torch.cat([torch.tensor([*ids, *[0] * tokens]) for ids in prompts]).to(device)
    bounds = torch.tensor([0, *rooms]).cumsum(0)
    at = (bounds[:-1] + torch.tensor([len(ids) - 1 for ids in prompts])).to(device)
    batch: dict[str, Any] = {
        "input_ids": row.view(1, -1),
        "position_ids": torch.cat([torch.arange(room) for room in rooms]).view(1, -1).to(device),
        "cu_seqlens": bounds.to(device, torch.int32),
        "max_seqlen": max(rooms),
    }
    written = []
    for _ in range(tokens):
        chosen = module(batch | {"logits_at": at}).argmax(-1)
        at = at + 1
        row[at] = chosen
        written.append(chosen)
    return torch.stack(written, 1).cpu()


def _until(ids: list[int], ends: Collection[int]) -> list[int]:
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids))]


def read_prompts(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each prompt's file and line, and the prompt: `{"prompt": text}` or `{"messages": [...]}`.

    Raises:
        PackError: The file cannot be read, is empty, or a line is no prompt.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PackError(f"`sample`: {file} cannot be read ({reason}); expected a file of prompts.") from error
    number = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, _record(line, where) if file.suffix == ".jsonl" else {"prompt": line}
    if not any(line.strip() for line in lines):
        raise PackError(f"`sample`: {file} is empty; expected a prompt in each line. Write some.")


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise PackError(f"{where}: is not JSON ({error}). Correct the line, or name the file .txt.") from error
    known = isinstance(record, dict) and (
        isinstance(record.get("prompt"), str) or isinstance(record.get("messages"), list)
    )
    if not known:
        raise PackError(f'{where}: has neither a "prompt" that is text nor a list of "messages"; expected one of them.')
    return dict(record)


def _load_tokenizer(dataset: Dataset) -> Any:
    from tokenizers import Tokenizer

    file = dataset.path / "tokenizer" / "tokenizer.json"
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PackError(f"{file}: is missing; expected the tokenizer that `sample` needs. See pack verify.") from error


def _render(messages: list[Any], dataset: Dataset, where: str) -> str:
    """Return a conversation as the template asks the model to answer it.

    Raises:
        PackError: The dataset has no chat template, or it does not take the messages.
    """
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(dataset.path / "tokenizer", trust_remote_code=False)
    except (ValueError, OSError) as error:  # code of its own is never run
        raise PackError(
            f"{where}: the tokenizer in {dataset.path} cannot be loaded for `messages` ({reason_of(error)}). "
            "Give a `prompt`."
        ) from error
    if not tokenizer.chat_template:
        raise PackError(f"{where}: {dataset.path} has no chat template; expected one for `messages`. Give a `prompt`.")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise PackError(f"{where}: the chat template does not take these messages ({error}). Correct them.") from error
    return str(text)
