"""How other projects turn JSONL into tokens on disk: this runs in their environments, see `peers.py`.

Each with the tokenizer library that it ships with, or with the fast engine in its place.

    .peers/litdata/bin/python benchmarks/peer_builds.py litdata '{"corpus": …}'
"""

import fileinput
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers import CHUNK_BYTES, with_torchvision

BATCH = 1000  # texts in one call of a tokenizer
FAST = "fastokens"  # the engine of a path that does not run the one its project ships
STATE: dict[str, Any] = {}  # of a process of Megatron's pool


def texts_of(corpus: list[str], worker: int, workers: int) -> list[str]:
    """Return every `workers`-th text; that of a conversation is what its messages say."""
    with fileinput.input(corpus, encoding="utf-8") as lines:
        records = [json.loads(line) for number, line in enumerate(lines) if number % workers == worker]
    return [
        record["text"] if "text" in record else "\n".join(message["content"] for message in record["messages"])
        for record in records
    ]


def end_of_text(tokenizer: str) -> str:
    """Return the EOS token of a tokenizer directory."""
    token = json.loads(Path(tokenizer, "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
    return str(token["content"] if isinstance(token, dict) else token)


def id_of(tokenizer: str, text: str) -> int:
    """Return the id of an added token."""
    added = json.loads(Path(tokenizer, "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return next(int(token["id"]) for token in added if token["content"] == text)


class Documents:
    """A tokenizer over a share of the texts: ids, int32, one EOS at the end of each."""

    def __init__(self, corpus: list[str], tokenizer: str, workers: int, engine: str) -> None:
        self.corpus, self.tokenizer, self.workers, self.engine = corpus, tokenizer, workers, engine

    def __call__(self, worker: int) -> Iterator[Any]:
        import numpy as np

        texts, file = texts_of(self.corpus, worker, self.workers), f"{self.tokenizer}/tokenizer.json"
        end = id_of(self.tokenizer, end_of_text(self.tokenizer))
        if self.engine == FAST:
            import fastokens

            fast = fastokens.Tokenizer.from_file(file)
            for start in range(0, len(texts), BATCH):
                flat, bounds = fast.encode_batch_flat(texts[start : start + BATCH], add_special_tokens=True)
                ids, at = np.frombuffer(flat, np.int32), np.frombuffer(bounds, np.int64)
                yield from (np.append(ids[low:high], np.int32(end)) for low, high in pairwise(at))
            return
        from tokenizers import Tokenizer

        reference = Tokenizer.from_file(file)
        for start in range(0, len(texts), BATCH):
            for encoding in reference.encode_batch_fast(texts[start : start + BATCH]):
                yield np.array([*encoding.ids, end], np.int32)


def build_datatrove(corpus: list[str], tokenizer: str, scratch: str, seq_len: int, workers: int, engine: str) -> int:
    """Tokenize into datatrove's `.ds` files with its own step; it cuts to seq_len when it reads."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    # a task takes whole files, so each gets one; and its own `eos_token` would leave out what comes before a document
    Path(scratch, "cache").mkdir(parents=True)
    with fileinput.input(corpus, mode="rb") as lines, ExitStack() as stack:
        names = [Path(scratch, "cache", f"{worker}.jsonl") for worker in range(workers)]
        shares = [stack.enter_context(name.open("wb")) for name in names]
        for number, line in enumerate(lines):
            shares[number % workers].write(line)
    made = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    around = [*made.encode("").tokens, end_of_text(tokenizer)]
    made.post_processor = TemplateProcessing(
        single=[*around[:-1], "$A", around[-1]],
        special_tokens=[(token, made.token_to_id(token)) for token in dict.fromkeys(around)],
    )
    Path(scratch, "tokenizer").mkdir()
    made.save(f"{scratch}/tokenizer/tokenizer.json")
    with_engine(engine)
    LocalPipelineExecutor(
        [
            JsonlReader(f"{scratch}/cache", glob_pattern="*.jsonl"),
            # its default of 10,000 documents at once took more than 12 GiB a process where documents are files
            DocumentTokenizer(f"{scratch}/out", f"{scratch}/tokenizer/tokenizer.json", batch_size=BATCH),
        ],
        tasks=workers, workers=workers, logging_dir=f"{scratch}/cache/logs", start_method="fork",
    ).run()  # fmt: skip
    width = 4 if made.get_vocab_size() > 1 << 16 else 2
    return sum(file.stat().st_size for file in Path(scratch, "out").glob("*.ds")) // width


def with_engine(engine: str) -> None:
    """Put the fast engine in the reference's place, for a project that loads its tokenizer itself."""
    if engine == FAST:
        import tokenizers
        from fastokens._compat import _TokenizerShim

        tokenizers.Tokenizer = _TokenizerShim


def build_litdata(corpus: list[str], tokenizer: str, scratch: str, seq_len: int, workers: int, engine: str) -> int:
    """Tokenize into litdata's chunks of tokens."""
    from litdata import TokensLoader, optimize

    optimize(
        Tensors(corpus, tokenizer, workers, engine), list(range(workers)), f"{scratch}/out", chunk_bytes=CHUNK_BYTES,
        num_workers=workers, item_loader=TokensLoader(block_size=seq_len), start_method="fork", verbose=False,
    )  # fmt: skip
    return sum(chunk["dim"] for chunk in json.loads(Path(scratch, "out", "index.json").read_text())["chunks"])


class Tensors(Documents):
    """The same as tensors, which litdata takes."""

    def __call__(self, worker: int) -> Iterator[Any]:
        import torch

        yield from map(torch.from_numpy, super().__call__(worker))


def build_megatron(corpus: list[str], tokenizer: str, scratch: str, seq_len: int, workers: int, engine: str) -> int:
    """Tokenize into .bin and .idx as Megatron's tools/preprocess_data.py does; it cuts to seq_len when it trains.

    That script is no part of the package: this repeats its loop (one document a call, 32 a task) with its own writer.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    Path(scratch).mkdir(parents=True)
    out, total = f"{scratch}/corpus_text_document", 0
    builder = IndexedDatasetBuilder(f"{out}.bin", dtype=DType.optimal_dtype(vocabulary_size(tokenizer)))
    initial = (tokenizer, engine)
    with (
        fileinput.input(corpus, encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(workers, start_megatron, initial) as pool,
    ):
        for ids in pool.imap(encode_megatron, lines, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
            total += len(ids)
    builder.finalize(f"{out}.idx")
    return total


def vocabulary_size(tokenizer: str) -> int:
    """Return the number of ids of a tokenizer directory."""
    content = json.loads(Path(tokenizer, "tokenizer.json").read_text(encoding="utf-8"))
    return len(content["model"]["vocab"]) + len(content["added_tokens"])


def start_megatron(tokenizer: str, engine: str) -> None:
    """Load the tokenizer of a process."""
    if engine == FAST:
        import fastokens

        fastokens.patch_transformers()
    from transformers import AutoTokenizer

    STATE["tokenizer"] = AutoTokenizer.from_pretrained(tokenizer)


def encode_megatron(line: str) -> list[int]:
    """Return the ids of one line, EOS at their end."""
    made = STATE["tokenizer"]
    return [*made(json.loads(line)["text"])["input_ids"], made.eos_token_id]


def build_mosaicml(corpus: list[str], tokenizer: str, scratch: str, seq_len: int, workers: int, engine: str) -> int:
    """Tokenize, concatenate and cut into MDS samples of seq_len, as its users do; a process's last one is short."""
    with_torchvision()
    from streaming.base.util import merge_index

    tempfile.tempdir = f"{scratch}/cache"  # it leaves a folder behind
    Path(tempfile.tempdir).mkdir(parents=True)
    share = Documents(corpus, tokenizer, workers, engine)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        tokens = sum(pool.starmap(write_mds, [(share, scratch, seq_len, worker) for worker in range(workers)]))
    merge_index(f"{scratch}/out", keep_local=True)
    return tokens


def write_mds(documents: Documents, scratch: str, seq_len: int, worker: int) -> int:
    import numpy as np
    from streaming import MDSWriter

    out, columns, total = f"{scratch}/out/{worker}", {"tokens": "ndarray:int32"}, 0
    with MDSWriter(out=out, columns=columns, size_limit=CHUNK_BYTES) as writer:
        held = np.zeros(0, np.int32)
        for ids in documents(worker):
            total += len(ids)
            held = np.concatenate([held, ids])
            full = len(held) // seq_len * seq_len
            for start in range(0, full, seq_len):
                writer.write({"tokens": held[start : start + seq_len]})
            held = held[full:]
        if len(held):
            writer.write({"tokens": held})
    return total


BUILD: dict[str, Callable[..., int]] = {
    "datatrove": build_datatrove,
    "litdata": build_litdata,
    "megatron-core": build_megatron,
    "mosaicml-streaming": build_mosaicml,
}

if __name__ == "__main__":
    wanted = json.loads(sys.argv[2])
    names = ("corpus", "tokenizer", "scratch", "seq_len", "workers", "engine")
    made = BUILD[sys.argv[1]](**{name: wanted[name] for name in names})
    Path(wanted["result"]).write_text(json.dumps({"tokens": made}))
