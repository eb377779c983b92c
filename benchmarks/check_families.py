"""Which causal families of the installed transformers can be packed, and in which way?

    python benchmarks/check_families.py                    # all families, one line each (some minutes)
    python benchmarks/check_families.py mamba2 gemma4_text # some of them
    python benchmarks/check_families.py --markdown         # the table of docs/models.md and of the results file

A family is a `model_type` of transformers' mapping of causal language models. Each gets a tiny configuration that is
legal for it and holds every kind of layer that its default has, random weights, and the checks that every run makes.
"""

import argparse
import copy
import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer.model.attention import IMPLEMENTATION, register
from trainer.model.backends.foreign import describe_failure, failure_of
from trainer.model.isolation import inspect_model, refusal
from trainer.model.loading import _without_attention_dropout
from trainer.model.report import ModelReport

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "intermediate_size": 48, "ffn_dim": 48,
    "n_inner": 48, "d_inner": 128, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "n_positions": 128, "max_seq_len": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "moe_topk": 2, "moe_num_experts": 4, "moe_k": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_ssm": 128, "n_groups": 1, "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_headdim": 16, "n_mamba_heads": 1, "mamba_dt_rank": 4, "time_step_rank": 4, "chunk_size": 16,
    "mamba_chunk_size": 16, "block_size": 8, "lru_width": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "sliding_window": 16, "attention_window_size": 16,
    "attention_chunk_size": 16, "rope_dim": 8, "word_embed_proj_dim": 64, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_hidden_size": 64,
    "linear_head_dim": 16, "linear_num_heads": 4, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "num_kv_shared_layers": 0,
}  # fmt: skip
"Values for whatever a configuration calls its sizes; only fields that its default has are set."
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
HEADS = {"head_dim": 16}
KEYS = {"num_key_value_heads": 2}
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "ministral": HEADS,
    "nemotron": KEYS,
    "reformer": {"is_decoder": True},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "xlstm": {"num_heads": 4, "num_blocks": 2, "embedding_dim": 64},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
    "xlnet": {"d_head": 16},
    "kimi_linear": {"num_experts_per_token": 2, "head_dim": 16, "qk_head_dim": 32},
    "bailing_hybrid": {
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "head_dim": 16,
        "qk_head_dim": 32,
        "num_experts": 4,
    },
    "longcat_flash": {"qk_head_dim": 32, "head_dim": 16, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "ple_embed_dim": 64},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba2": {
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
}
"What a family needs beyond that to be legal."


UNTRIED = {
    "blt": "its default is several large models in one",
    "dbrx": "transformers cannot build its configuration from fields",
    "dots3_note": "transformers cannot build its configuration from fields",
    "dots3_note_text": "transformers cannot build its configuration from fields",
    "gemma3n": "needs timm for its images; gemma3n_text is its decoder",
    "gemma4_assistant": "drafts tokens from another model's keys and values",
    "gemma4_unified_assistant": "drafts tokens from another model's keys and values",
    "musicgen": "decodes audio from a text encoder",
    "musicgen_melody": "decodes audio from a text encoder",
}


@dataclass
class Row:
    """What came out for one family."""

    family: str
    kind: str
    "decoder, encoder, encoder-decoder, or untried."
    accepted: bool
    ways: list[str]
    reason: str | None


def tiny_text(config: Any, layers: int = 2) -> dict[str, Any]:
    """Return the fields of a small configuration with every kind of layer that the default has."""
    fields = config.to_dict()
    total = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), 0)
    keep = layers
    lists = {k: v for k, v in fields.items() if isinstance(v, list) and total and len(v) == total}
    lists = {k: v for k, v in lists.items() if len(set(map(str, v))) <= 4}  # else numbers of layers
    for value in lists.values():
        keep = max([keep, *(value.index(kind) + 1 for kind in value if isinstance(kind, (str, bool, int)))])
    fields |= {name: value[:keep] for name, value in lists.items()}
    fields |= {name: keep for name in LAYERS if isinstance(fields.get(name), int)}
    fields |= {
        name: value for name, value in SMALL.items() if fields.get(name) is not None or name.endswith("token_id")
    }
    if fields.get("num_key_value_heads") and config.num_key_value_heads == config.num_attention_heads:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name in ("architectures", "transformers_version", "per_layer_config", "per_layer_attributes"):
        fields.pop(name, None)  # of the default's sizes
    return fields


def tiny(family: str) -> Any:
    """Return a small configuration of a family."""
    default = CONFIG_MAPPING[family]()
    text = default.get_text_config()
    if text is default:
        return type(default)(**tiny_text(default) | OWN.get(family, {}))
    fields = copy.deepcopy(default.to_dict())
    for name, value in list(fields.items()):
        if isinstance(value, dict) and "model_type" in value and value["model_type"] in CONFIG_MAPPING:
            part = CONFIG_MAPPING[value["model_type"]](**value)
            fields[name] = tiny_text(part) | OWN.get(value["model_type"], {})
    return type(default)(**fields | OWN.get(family, {}))


def check(family: str) -> Row:
    """Probe one family."""
    config = tiny(family)
    text = config.get_text_config()
    kind = "decoder"
    if getattr(text, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        kind = "encoder-decoder"
    report = ModelReport(name=family, model_type=family, reason=refusal(config))
    if report.reason is None:
        _without_attention_dropout(config)
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION)
        except KeyError as error:
            if error.args != (IMPLEMENTATION,):
                raise
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        report = inspect_model(model, family, random=True)
    if report.reason and "not causal" in report.reason:
        kind = "encoder"
    return Row(family, kind, report.accepted, report.ways, report.reason)


def checked(family: str) -> Row:
    """Probe one family; one that cannot be tried is a row with its reason."""
    if family in UNTRIED:
        return Row(family, "untried", False, [], UNTRIED[family])
    rows: list[Row] = []
    if (error := failure_of(lambda: rows.append(check(family)))) is not None:
        return Row(family, "untried", False, [], f"no legal tiny configuration: {describe_failure(error)[:150]}")
    return rows[0]


def way_of(row: Row) -> str:
    """Return the way in one word or two."""
    if not row.accepted:
        return "refused" if row.kind != "untried" else "not tried"
    if any(way.startswith("all layers") for way in row.ways):
        return "whole body on rectangles"
    return "mixers on rectangles" if any("rectangles" in way for way in row.ways) else "packed attention"


def markdown(rows: list[Row]) -> str:
    """Return the counts and the table."""
    decoders = [row for row in rows if row.kind == "decoder"]
    accepted = sum(row.accepted for row in decoders)
    counts = Counter(way_of(row) for row in rows)
    each = ", ".join(f"{way}: {count}" for way, count in counts.most_common())
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__}: {accepted} of the {len(decoders)} "
        f"decoder-only families tried are accepted ({each}; "
        f"{len(rows)} families in all).",
        "",
        "| family | way | layers, or the reason |",
        "|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.kind != "decoder", not row.accepted, row.family)):
        text = row.reason or "; ".join(row.ways)
        lines.append(f"| {row.family} | {way_of(row)} | {text.replace('|', '/')} |")
    return "\n".join(lines)


def main() -> None:
    """Check the families that are asked for and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    register()
    rows = []
    for family in options.families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        rows.append(row := checked(family))
        if not options.markdown:
            print(f"{row.family:28} {way_of(row):26} {row.reason or '; '.join(row.ways)}", flush=True)
    if options.markdown:
        print(markdown(rows))


if __name__ == "__main__":
    main()
