"""How many conversations a second become ids and masks, against what TRL calls for the same?

One process, CPU seconds, no disk: records in memory through `DocumentMaker`, and through transformers'
`apply_chat_template(return_assistant_tokens_mask=True)`, which is what TRL's trainers map over a corpus. Both get TRL's
marked template for Qwen2.5, and ids and masks are compared; ours runs with the plain template and with Qwen3's, which
rewrites history, as well. Conversations are made of random words, in lengths and turns like OASST's.

    python benchmarks/bench_chat.py --quick
    python benchmarks/bench_chat.py --tokenizer DIR
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from write_up import WriteUp, middle, run, tell

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.jinja import CompiledTemplate
from pipeline.documents.make import DocumentMaker
from pipeline.sources.reader import RecordBatch
from pipeline.tokens import Documents, concatenate

PACKAGES = ("shardpack", "transformers", "trl", "tokenizers", "fastokens", "gigatoken", "jinja2")
BATCH = 1000
Record = dict[str, Any]


def conversations(number: int, seed: int = 0) -> list[Record]:
    """Make conversations: 1 to 5 exchanges, questions of about 25 words and answers of about 120."""
    rng = np.random.default_rng(seed)
    words = ["".join(map(chr, rng.integers(97, 123, size))) for size in rng.integers(2, 10, 4000)]

    def text(median: float) -> str:
        size = int(np.clip(rng.lognormal(np.log(median), 0.8), 2, 2000))
        return " ".join(words[place] for place in rng.zipf(1.3, size) % len(words)).capitalize() + "."

    made = []
    for turns in rng.choice([1, 2, 3, 4, 5], number, p=[0.4, 0.3, 0.15, 0.1, 0.05]):
        talk = []
        for _ in range(turns):
            talk += [{"role": "user", "content": text(25)}, {"role": "assistant", "content": text(120)}]
        made.append({"messages": talk})
    return made


def refuse(index: int, reason: str) -> None:
    raise ValueError(f"conversation {index}: {reason}")


def ours(records: list[Record], encoder: Encoder, template: str) -> Documents:
    """Make documents as a worker of a build does."""
    maker = DocumentMaker(encoder, RecordOptions(kind="chat", chat_template=template, add_eos=False))
    parts = []
    for start in range(0, len(records), BATCH):
        batch = records[start : start + BATCH]
        parts.append(maker.make(RecordBatch(batch, np.arange(len(batch)) + start, 0, str, refuse))[0])
    return concatenate(parts)


def theirs(records: list[Record], tokenizer: Any, template: str) -> list[tuple[list[int], list[int]]]:
    """Return ids and masks as TRL gets them."""
    made = []
    for record in records:
        found = tokenizer.apply_chat_template(
            record["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        made.append((found["input_ids"], found["assistant_masks"]))
    return made


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """Return CPU seconds of each run after one that warms up."""
    call()
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return seconds


def renderings(call: Callable[[], Any]) -> int:
    """Count the renderings that a call makes."""
    count, plain, marked = 0, CompiledTemplate.render, CompiledTemplate.render_blocks

    def counting(real: Any) -> Any:
        def render(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            return real(*arguments, **keywords)

        return render

    CompiledTemplate.render, CompiledTemplate.render_blocks = counting(plain), counting(marked)  # type: ignore[method-assign]
    try:
        call()
    finally:
        CompiledTemplate.render, CompiledTemplate.render_blocks = plain, marked  # type: ignore[method-assign]
    return count


def measure(arguments: argparse.Namespace) -> WriteUp:
    """Run everything."""
    import trl
    from transformers import AutoTokenizer

    folder = Path(next(iter(trl.__path__))) / "chat_templates"
    names = {"marked": "qwen2_5_training", "plain": "qwen2_5", "rewrites history": "qwen3"}
    templates = {name: (folder / f"{file}.jinja").read_text(encoding="utf-8") for name, file in names.items()}
    records = conversations(200 if arguments.quick else arguments.conversations)
    few = records[: 100 if arguments.quick else 2000]
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.tokenizer or _small_tokenizer(Path(scratch), records[:200])
        encoder, tokenizer = Encoder(directory), AutoTokenizer.from_pretrained(directory)
        _compare(ours(few, encoder, templates["marked"]), theirs(few, tokenizer, templates["marked"]))
        tell("ids and masks are equal; timing")
        base = [len(few) / s for s in timed(lambda: theirs(few, tokenizer, templates["marked"]), arguments.repeats)]
        rows = [["apply_chat_template, marked", middle(base), "1", "1", "1"]]
        for name, template in templates.items():

            def call(template: str = template) -> Documents:
                return ours(records, encoder, template)

            speeds = [len(records) / s for s in timed(call, arguments.repeats)]
            documents, count = len(call().doc_ids), renderings(call)
            times = float(np.median(speeds) / np.median(base))
            per = [f"{documents / len(records):.2f}", f"{count / len(records):.2f}"]
            rows.append([f"shardpack, {name}", middle(speeds), f"{times:.1f}", *per])
            tell(rows[-1][0])
    columns = ["", "conversations a CPU second", "times the first", "documents each", "renderings each"]
    setting = [f"{len(records):,} conversations for shardpack, the first {len(few):,} for transformers; one process."]
    return WriteUp("Conversations", setting, [("", columns, rows)])


def _compare(documents: Documents, pairs: list[tuple[list[int], list[int]]]) -> None:
    for place, (ids, mask) in enumerate(pairs):
        start, stop = documents.offsets[place : place + 2]
        if documents.input_ids[start:stop].tolist() != list(ids):
            raise ValueError(f"conversation {place}: other ids")
        # white space after an end mark is no target here, whatever the marks say
        if any(mine > other for mine, other in zip(documents.mask_of(start, stop).tolist(), mask, strict=True)):
            raise ValueError(f"conversation {place}: a target that the marks do not hold")


def _small_tokenizer(folder: Path, records: list[Record]) -> str:
    """Train a small byte-level tokenizer, for runs without one."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = (message["content"] for record in records for message in record["messages"])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet))
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    (folder / "tokenizer_config.json").write_text(config)
    return str(folder)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--tokenizer", help="directory; a small one is trained if omitted")
    parser.add_argument("--conversations", type=int, default=100_000)


if __name__ == "__main__":
    run("chat", __doc__ or "", measure, PACKAGES, add_flags)
