"""Write the golden dataset of format version 2 (`python tests/golden/write_v2.py`).

Until version 2 is released, a change of the plan or of the rows writes `v2` and the report anew, on purpose and in the
commit that makes it. From the release on they are never rewritten: they prove that later releases still read them, and
would build the same rows from the same corpus. The corpus and the tokenizer are small, made on the spot, and a
vocabulary read from here rather than trained, so that no library can change it. `v1` is there to be refused.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline import BuildConfig, RecordOptions, build

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Packing puts several documents into one row, so that no token is padding. " * 6,
    "",
    "Ein Satz auf Deutsch: äöü. 한국어. 👍",
    "a",
    "def add(a, b):\n    return a + b\n" * 3,
    "An answer </s> that only looks like the end.",
    "1 2 3 10 100 1000 2024 3.14159 -7 42",
]
CHATS: list[list[tuple[str, str]]] = [
    [("system", "Be brief."), ("user", "Capital of France?"), ("assistant", "Paris.")],
    [("user", "Hello!"), ("assistant", "Hello."), ("user", "Bye."), ("assistant", "Bye, and come back.")],
    [("user", "Nobody answers.")],
]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("a", "n"),
    ("Ġ", "the"),
    ("e", "r"),
    ("o", "n"),
    ("in", "g"),
    ("r", "e"),
]
SPECIALS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE of 256 bytes and a handful of merges."""
    symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write(directory: Path) -> Path:
    """Write corpus and tokenizer into `directory`, build, and return the dataset."""
    write_tokenizer(directory / "tokenizer")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (directory / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    (directory / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    build(
        BuildConfig(
            sources=(f"texts={directory / 'texts.jsonl'}", f"chats={directory / 'chats.jsonl'}"),
            source_records={"chats": RecordOptions(kind="chat")},
            out=str(directory / "dataset"),
            tokenizer=str(directory / "tokenizer"),
            seq_len=128,
            window_bytes=600,
            tokenizer_engine="tokenizers",
        )
    )
    return directory / "dataset"


if __name__ == "__main__":
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        dataset = write(Path(scratch))
        shutil.rmtree(here / "v2", ignore_errors=True)
        shutil.copytree(dataset, here / "v2")
