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
import signal
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shards.errors import reason_of
from trainer.model.attention import IMPLEMENTATION, register
from trainer.model.isolation import ModelReport, inspect_model, refusal
from trainer.model.loading import _without_attention_dropout

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
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "num_kv_shared_layers": 0,
}  # fmt: skip
"Values for whatever a configuration calls its sizes; only fields that its default has are set."
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
OWN: dict[str, dict[str, Any]] = {}
"What a family needs beyond that to be legal."


@dataclass
class Row:
    """What came out for one family."""

    family: str
    kind: str
    "decoder, encoder-decoder, encoder, or part of one."
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
    fields.pop("architectures", None)
    fields.pop("transformers_version", None)
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


def main() -> None:
    """Check the families that are asked for and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    register()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    rows = []
    for family in options.families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        signal.alarm(90)
        try:
            row = check(family)
        except Exception as error:
            row = Row(family, "?", False, [], f"NO CONFIG {type(error).__name__}: {reason_of(error)[:200]}")
        rows.append(row)
        print(
            f"{row.family:28} {row.kind:16} {'ok ' if row.accepted else 'NO '} {row.reason or ' | '.join(row.ways)}",
            flush=True,
        )
    print(Counter((row.kind, row.accepted) for row in rows))


if __name__ == "__main__":
    main()
