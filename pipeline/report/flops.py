"""What a step costs on a model of a given shape, from its config alone.

Training costs 6 FLOPs per weight and token, and 12 per attention pair, head dimension and layer (forward and backward,
after Chowdhery et al. 2022, appendix B). Attention is counted on the pairs that the mask allows, not on seq_len
squared; a layer with a sliding window counts the pairs inside it. Embeddings cost nothing, the head does.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.cost import ModelCost
from shards.errors import ModelError, reason_of
from shards.quiet import quiet


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The figures of a causal language model that decide what tokens and attention pairs cost."""

    name: str
    "Where the shape comes from, for people."
    weights: int
    "Weights that every token is multiplied with, the head included."
    attention_width: int
    "Query heads x head dimension; where keys are wider than values (latent attention), x their mean."
    full_layers: int
    "Layers whose tokens see everything before them; recurrent and linear layers are in neither count."
    sliding_layers: int = 0
    "Layers whose tokens see `window` tokens."
    sliding_width: int | None = None
    "`attention_width` of those, if it differs."
    window: int | None = None
    "Tokens that a token sees in a sliding layer, itself included."
    vocab_size: int | None = None
    "Rows of the embedding."
    max_positions: int | None = None
    "Longest segment that the model takes; None where nothing limits it."

    @property
    def cost(self) -> ModelCost:
        """What tokens and attention pairs cost."""
        return ModelCost(
            per_token=6.0 * self.weights,
            per_pair=12.0 * self.attention_width * self.full_layers,
            per_window_pair=12.0 * (self.sliding_width or self.attention_width) * self.sliding_layers,
            sliding_window=self.window if self.sliding_layers else None,
        )


# 16 layers of width 2048: the size at which people fine-tune on one GPU
DEFAULT_SHAPE = ModelShape(
    name="Llama shape of 1.24B weights", weights=1_235_746_816, attention_width=2048, full_layers=16
)
# models whose feed-forward part has two matrices, not three
UNGATED = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "falcon", "bloom", "starcoder2"}


def load_shape(name: str) -> ModelShape:
    """Read the shape of a model from a directory, a config JSON, or the hub.

    Raises:
        ModelError: There is no such config, or it names no shape.
    """
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            config = json.loads(file.read_bytes())
        except ValueError as error:
            raise ModelError(f"{file}: is not JSON; expected a model's config.json.") from error
    else:
        config = _hub_config(name)
    return shape_of(config, name)


def _hub_config(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        with quiet():
            return dict(AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"`model`: {name}; no such directory, file or hub model ({reason_of(error)}). Name one with a config.json."
        ) from error


def shape_of(config: dict[str, Any], name: str) -> ModelShape:
    """Return the shape that a transformers config describes.

    Raises:
        ModelError: A figure is missing.
    """
    text = config.get("text_config") or config

    def figure(*keys: str, default: int | None = None) -> int:
        value = next((text[key] for key in keys if text.get(key) is not None), default)
        if not isinstance(value, int):
            raise ModelError(f"{name}: its config has no {keys[0]}; expected a causal language model's config.json.")
        return value

    hidden, layers = figure("hidden_size", "n_embd", "d_model"), figure("num_hidden_layers", "n_layer", "num_layers")
    if text.get("state_size"):  # a state-space model: its num_heads are no attention heads
        heads = figure("num_attention_heads", default=0)
    else:
        heads = figure("num_attention_heads", "n_head", "num_heads")
    kv_heads, head_dim = (
        figure("num_key_value_heads", default=heads),
        figure("head_dim", default=hidden // max(heads, 1)),
    )
    vocab = figure("vocab_size")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    if not heads:  # gates, state and output
        attention = 3 * hidden * int(text.get("expand", 2) * hidden)
    full, windowed = _attention_layers(text, layers if heads else 0)
    widths = [_attention_width(text, i, heads, head_dim) for i in [*full[:1], *windowed[:1]]] or [0]
    return ModelShape(
        name=name,
        weights=layers * (attention + (_mlp(text, hidden, figure) if heads else 0)) + hidden * vocab,
        attention_width=widths[0],
        full_layers=len(full),
        sliding_layers=len(windowed),
        sliding_width=widths[-1] if windowed else None,
        window=(text.get("sliding_window") or text.get("attention_chunk_size")) if windowed else None,
        vocab_size=vocab,
        max_positions=positions,
    )


def _mlp(text: dict[str, Any], hidden: int, figure: Any) -> int:
    """Weights of one layer's feed-forward part that a token meets: in a mixture, its experts and the router."""
    wide = figure("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")
    matrices = 2 if text.get("model_type") in UNGATED else 3
    if not experts:
        return matrices * hidden * int(wide)
    active = figure("num_experts_per_tok", "top_k", default=2)
    wide = figure("moe_intermediate_size", "intermediate_size")
    return matrices * hidden * int(wide) * int(active) + hidden * int(experts)


def _attention_layers(text: dict[str, Any], layers: int) -> tuple[list[int], list[int]]:
    """Return the layers that see everything before a token, and those with a window; a chunk counts as a window.

    Recurrent, convolutional and linear-attention layers have no pairs and are in neither.
    """
    window = text.get("sliding_window") if text.get("use_sliding_window") is not False else None
    kinds = text.get("layer_types") or text.get("layers_block_type")
    kinds = kinds or ["sliding_attention" if window else "full_attention"] * layers
    attending = [(i, kind) for i, kind in enumerate(kinds[:layers]) if kind in _SEES or "attention" in kind]
    attending = [(i, kind) for i, kind in attending if kind != "linear_attention"]
    narrow = {"sliding_attention"} if window else set()
    narrow |= {"chunked_attention"} if text.get("attention_chunk_size") else set()
    return (
        [i for i, kind in attending if kind not in narrow],
        [i for i, kind in attending if kind in narrow],
    )


_SEES = {"hybrid", "hybrid_sliding"}  # attention beside something else, in one layer


def _attention_width(text: dict[str, Any], layer: int, heads: int, head_dim: int) -> int:
    """Return query heads x the mean width of keys and values in one layer."""
    own: dict[str, Any] = next((v for key, v in (text.get("per_layer_config") or {}).items() if int(key) == layer), {})
    text = text | own
    value = text.get("v_head_dim") or text.get("head_dim") or head_dim
    latent = text.get("qk_nope_head_dim")
    key = latent + text["qk_rope_head_dim"] if latent else text.get("head_dim") or head_dim
    return int(text.get("num_attention_heads", heads)) * int(key + value) // 2
