"""Which conversations of a corpus does a chat template take, so that their masks are exact, and why not the others?

Nothing is built: every record is rendered, its mask found and its text encoded, as a build would. A prompt and a
completion that are texts are taken as two messages, so that the template has its part in them too.

    python benchmarks/check_templates.py TOKENIZER_DIR... CORPUS.jsonl... [--train-on last-assistant]
    python benchmarks/check_templates.py TOKENIZER_DIR=TEMPLATE.jinja CORPUS.jsonl   # another template than its own
"""

import argparse
import hashlib
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.config import RecordOptions
from pipeline.documents.encoder import Encoder
from pipeline.documents.make import DocumentMaker
from pipeline.sources.reader import RecordBatch

REASONS = {
    "rewrites earlier turns": "earlier turns rewritten",
    "leaves out tool_calls": "tool calls left out",
    "leaves out": "other parts left out",
    "the chat template refuses": "refused by the template itself",
    "hold control text": "control text in contents",
}


def main() -> None:
    """Print one table: a row for each corpus, a column for each template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="DIR or DIR=TEMPLATE.jinja for each column, JSONL files"
    )
    parser.add_argument("--train-on", default="auto", help="as in pack build")
    arguments = parser.parse_args()
    corpora = [Path(path) for path in arguments.paths if path.endswith(".jsonl")]
    columns = [_column(path, arguments.train_on) for path in arguments.paths if not path.endswith(".jsonl")]
    if not columns or not corpora:
        parser.error("expected at least one directory with a tokenizer and one JSONL file")
    packages = ", ".join(f"{name} {version(name)}" for name in ("shardpack", "transformers", "tokenizers"))
    print(f"{packages}; --train-on {arguments.train_on}\n")
    print("| taken | " + " | ".join(f"{name} ({digest})" for name, digest, *_ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for corpus in corpora:
        records = [_as_messages(orjson.loads(line)) for line in corpus.read_bytes().splitlines()]
        cells = [_taken(records, encoder, options) for *_, encoder, options in columns]
        print(f"| {corpus.stem} | " + " | ".join(cells) + " |")


def _column(path: str, train_on: str) -> tuple[str, str, Encoder, RecordOptions]:
    """Return the name and digest of a template, its tokenizer and options."""
    directory, _, file = path.partition("=")
    encoder, template = Encoder(directory), Path(file).read_text("utf-8") if file else None
    options = RecordOptions(kind="chat", train_on=train_on, chat_template=template)
    digest = hashlib.sha256((template or encoder.spec.chat_template or "").encode()).hexdigest()[:8]
    return Path(file or directory).stem, digest, encoder, options


def _as_messages(record: dict[str, Any]) -> dict[str, Any]:
    if "messages" in record:
        return record
    roles = zip(("user", "assistant"), (record["prompt"], record["completion"]), strict=True)
    return {"messages": [{"role": role, "content": content} for role, content in roles]}


def _taken(records: list[dict[str, Any]], encoder: Encoder, options: RecordOptions) -> str:
    """Return how many records gave a document, and why the others did not."""
    causes: Counter[str] = Counter()

    def reject(index: int, reason: str) -> None:
        causes[next((cause for words, cause in REASONS.items() if words in reason), "bad record")] += 1

    documents, _ = DocumentMaker(encoder, options).make(RecordBatch(records, np.arange(len(records)), 0, str, reject))
    total = len(records)
    why = "".join(f"; {number:,} {cause}" for cause, number in causes.most_common())
    return f"all {total:,}" if not causes else f"{len(documents.doc_ids):,} of {total:,}{why}"


if __name__ == "__main__":
    main()
