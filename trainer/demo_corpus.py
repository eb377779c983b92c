"""The corpus of `pack demo`, which every Python has: its own standard library, with a tokenizer and a model to fit.

Module sources, and every docstring as a document of its own: thousands of documents from one line to tens of thousands
of tokens. The tokenizer is trained on the spot; nothing is fetched.
"""

import ast
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

VOCAB_SIZE = 8192
SEQ_LEN = 1024
TOKENIZER_TEXT = 3 << 20  # characters: enough for 8k words, a few seconds
# tests, tools with a face, and other people's packages: not what one would call the library
SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"}
MODEL = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ_LEN, "tie_word_embeddings": True,
}  # fmt: skip


def make_corpus(out: Path) -> tuple[list[Path], Path]:
    """Write corpus and tokenizer under a directory, unless they are there.

    Returns:
        The two JSONL files, sources and docstrings; the tokenizer's directory.
    """
    corpus, tokenizer = out / "corpus", out / "tokenizer"
    files = [corpus / "sources.jsonl", corpus / "docstrings.jsonl"]
    if not (tokenizer / "tokenizer.json").exists():  # written last
        corpus.mkdir(parents=True, exist_ok=True)
        modules = list(read_library())
        _write_documents(files[0], modules)
        _write_documents(files[1], [pair for module, source in modules for pair in find_docstrings(module, source)])
        train_tokenizer([text for file in files for text in _read_texts(file)], tokenizer)
    return files, tokenizer


def read_library() -> Iterator[tuple[str, str]]:
    """Yield name and source of every module of the standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py":
                try:
                    source = path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):  # a few sources are Latin-1, to test the tokenizer of Python
                    continue
                if source.strip():
                    yield path.relative_to(root).as_posix(), source


def find_docstrings(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of every docstring of a module."""
    try:
        with warnings.catch_warnings(action="ignore"):  # old escapes in strings
            tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{module}:{getattr(node, 'name', '')}", text


def _write_documents(path: Path, documents: list[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for name, text in documents:
            file.write(json.dumps({"name": name, "text": text}) + "\n")


def _read_texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def train_tokenizer(texts: list[str], out: Path) -> None:
    """Train a byte-level BPE on about `TOKENIZER_TEXT` characters, taken evenly from all texts, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    share = min(1.0, TOKENIZER_TEXT / max(1, sum(map(len, texts))))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((text[: max(80, int(len(text) * share))] for text in texts), trainer)
    out.mkdir(parents=True, exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (out / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))


def write_model_config(path: Path, vocab_size: int, max_positions: int) -> None:
    """Write the configuration of a Llama-shaped model of a few million parameters."""
    config = MODEL | {"vocab_size": vocab_size, "max_position_embeddings": max_positions}
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
