"""Configurations of small models, written where a test wants them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Write = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> Write:
    """Write a configuration and return its path."""

    def write(model_type: str, **fields: Any) -> str:
        path = tmp_path / f"{model_type}.json"
        path.write_text(json.dumps({"model_type": model_type, **(GPT2 if model_type == "gpt2" else SIZES), **fields}))
        return str(path)

    return write
