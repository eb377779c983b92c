"""Small tokenizers, built on the spot: each fixture is a directory with tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps for a while.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Packing puts several documents into one row, so that no token is padding.",
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system question answer one two three four five six seven eight nine ten",
    "Ein Satz auf Deutsch mit Umlauten: äöü. Une phrase en français: à la crème brûlée.",
    "1 2 3 10 100 1000 2024 3.14159 -7 42",
]
OTHER_TEXTS = ["Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt."] * 3
SPECIALS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(directory: Path, tokenizer: Tokenizer, **config: Any) -> str:
    """Write a tokenizer directory and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return str(directory)


def byte_level_bpe(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: SPECIALS get ids 0 to 4, `<think>` and `</think>` come last and are not flagged special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Byte-level BPE, about 400 entries, EOS `</s>`, ChatML template, no BOS added."""
    return write_tokenizer(
        tmp_path_factory.mktemp("tokenizers") / "bytes",
        byte_level_bpe(TRAINING_TEXTS, 400),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def other_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same class and special tokens as `tokenizer_dir`, another vocabulary."""
    return write_tokenizer(
        tmp_path_factory.mktemp("tokenizers") / "other",
        byte_level_bpe(OTHER_TEXTS, 330),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def bos_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Llama-2-like: BPE over characters with byte fallback, `▁` for spaces, `<unk>`, a post-processor that adds BOS."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only: keeps merges short
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*specials, *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXTS, trainer)
    plain = json.loads(tokenizer.to_str())
    plain["pre_tokenizer"] = None
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return write_tokenizer(
        tmp_path_factory.mktemp("tokenizers") / "bos",
        tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
        add_eos_token=False,
    )


@pytest.fixture(scope="session")
def unigram_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Unigram, T5-like: its control tokens stand in the model's own vocabulary; the post-processor adds EOS."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=320, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXTS * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return write_tokenizer(
        tmp_path_factory.mktemp("tokenizers") / "unigram",
        tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
