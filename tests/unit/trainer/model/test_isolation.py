"""Which models are accepted on packed rows, in which way, and which are refused in what words."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shards.errors import ModelError
from trainer.model import isolation, probe, unflatten
from trainer.model.backends.interface import Backend
from trainer.model.backends.registry import ATTENTION_BACKENDS
from trainer.model.loading import check_model, check_segments, load_model
from trainer.model.rectangles import Rectangles

Write = Callable[..., str]


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA = {
    "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
}  # fmt: skip
ACCEPTED: list[tuple[str, dict[str, Any], int, bool]] = [  # model type, fields, attention calls, plain head
    ("llama", {}, 2, True),
    ("gpt2", {}, 2, True),
    ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, 2, True),
    ("qwen2", {}, 2, True),
    ("qwen3", {"head_dim": 16}, 2, True),
    ("qwen3_moe", {**EXPERTS, "head_dim": 16}, 2, True),
    ("mixtral", {**EXPERTS, "sliding_window": 16}, 2, True),
    ("mistral", {"sliding_window": 16}, 2, True),
    ("phi3", {"sliding_window": 16}, 2, True),
    ("phimoe", {**EXPERTS, "sliding_window": None}, 2, True),
    (
        "gemma3_text",
        {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
        2,
        True,
    ),
    ("diffllama", {}, 4, True),
    ("deepseek_v3", LATENT, 2, True),
    ("granitemoehybrid", {**MAMBA, "layer_types": ["attention", "attention"]}, 2, True),
    ("granite", {"logits_scaling": 4.0}, 2, False),
    ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}, 2, False),
    ("gpt_oss", {**EXPERTS, "head_dim": 16, "sliding_window": 16}, 2, True),
    ("cohere", {"logit_scale": 0.25}, 2, False),
    ("nanochat", {"final_logit_softcapping": 15.0}, 2, False),
]
RECTANGLES = "run segment by segment, on rectangles"
WHOLE = f"all layers: {RECTANGLES}, with transformers'"
HYBRID = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
STATE = {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
KINDS: list[tuple[str, dict[str, Any], list[str]]] = [  # model type, fields, how each kind of layer is packed
    ("mamba", {"state_size": 4}, [f"MambaMixer, 2 layers: {RECTANGLES}"]),
    ("mamba2", STATE, [f"Mamba2Mixer, 2 layers: {RECTANGLES}"]),
    (
        "qwen3_next",
        {**HYBRID, **EXPERTS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        [
            "Qwen3NextAttention (heads of 16), 1 layer: packed attention",
            f"Qwen3NextGatedDeltaNet, 1 layer: {RECTANGLES} (causal_conv1d and fla would be faster)",
        ],
    ),
    (
        "lfm2",
        {"layer_types": ["conv", "full_attention"]},
        ["Lfm2Attention (heads of 8), 1 layer: packed attention", f"Lfm2ShortConv, 1 layer: {RECTANGLES}"],
    ),
    (
        "rwkv",
        {"context_length": 64},
        [f"RwkvSelfAttention, 2 layers: {RECTANGLES}", f"RwkvFeedForward, 2 layers: {RECTANGLES}"],
    ),
    (
        "granitemoehybrid",
        {**MAMBA, "layer_types": ["mamba", "attention"]},
        [
            "GraniteMoeHybridAttention (heads of 8), 1 layer: packed attention",
            f"GraniteMoeHybridMambaLayer, 1 layer: {RECTANGLES}",
        ],
    ),
    (
        "llama4_text",
        {
            **EXPERTS, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 16, "no_rope_layers": [1, 1],
            "layer_types": ["chunked_attention", "full_attention"],
        },
        [
            "Llama4TextAttention (heads of 8, chunks), 1 layer: packed attention",
            "Llama4TextAttention (heads of 8), 1 layer: packed attention",
        ],
    ),
    (
        "gemma4_text",
        {
            "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        [
            "Gemma4TextAttention (heads of 8, sliding window), 1 layer: packed attention",
            "Gemma4TextAttention (heads of 16), 1 layer: packed attention",
        ],
    ),
    ("bloom", {}, [f"{WHOLE} eager"]),
    ("falcon", {"alibi": True}, [f"{WHOLE} eager"]),
    ("stablelm", {}, [f"{WHOLE} sdpa"]),
    ("phimoe", {**EXPERTS, "sliding_window": 16}, [f"{WHOLE} sdpa"]),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}, [f"{WHOLE} eager"]),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {}, "is not causal: a token sees later ones"),
    ("t5", {}, "is an encoder-decoder; packed rows train decoders only"),
]


@pytest.mark.parametrize(("model_type", "fields", "calls", "plain"), ACCEPTED, ids=[each[0] for each in ACCEPTED])
def test_models_that_are_safe_are_accepted(
    model_type: str, fields: dict[str, Any], calls: int, plain: bool, config: Write
) -> None:
    report = check_model(config(model_type, **fields))
    assert report.reason is None
    assert (report.attention_calls, report.plain_head) == (calls, plain)
    assert report.leak < 1e-6
    assert report.parity < 1e-4
    assert "safe to pack" in report.text()


@pytest.mark.parametrize(("model_type", "fields", "ways"), KINDS, ids=[each[0] for each in KINDS])
def test_each_kind_of_layer_is_packed_in_the_first_way_that_is_proven(
    model_type: str, fields: dict[str, Any], ways: list[str], config: Write
) -> None:
    report = check_model(config(model_type, **fields))
    assert report.reason is None
    assert [line[: len(way)] for line, way in zip(report.ways, ways, strict=True)] == ways
    assert report.leak < 1e-6
    assert report.parity < 1e-4
    assert all(f"  kind            {way}" in report.text() for way in ways)


@pytest.mark.parametrize(("model_type", "fields", "reason"), REFUSED, ids=[each[0] for each in REFUSED])
def test_models_that_are_not_safe_are_refused_with_the_reason(
    model_type: str, fields: dict[str, Any], reason: str, config: Write
) -> None:
    path = config(model_type, **fields)
    assert f"({model_type}): refused, it {reason}" in check_model(path).text()
    with pytest.raises(ModelError, match=rf"\({model_type}\): the model {reason}.* Use another model"):
        load_model(path)


def test_a_scale_that_follows_the_row_and_not_the_document_is_found_out(config: Write) -> None:
    fields = {**EXPERTS, "intermediate_size_mlp": 48, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    plain = check_model(config("llama4_text", **fields, no_rope_layers=[1, 0], attn_temperature_tuning=False))
    assert plain.ways == ["Llama4TextAttention (heads of 8), 2 layers: packed attention"]
    scaled = check_model(config("llama4_text", **fields, no_rope_layers=[1, 0], attn_temperature_tuning=True))
    assert scaled.ways == [f"{WHOLE} sdpa"]
    assert any("computes something else packed than alone" in note for note in scaled.notes)


def no_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay the whole row out as one segment."""
    right = unflatten.plan_rectangles
    monkeypatch.setattr(unflatten, "plan_rectangles", lambda cu, **more: right(cu[[0, -1]], **more))


def test_attention_that_is_blind_to_boundaries_is_found_out(config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ATTENTION_BACKENDS["cpu"]

    def blind(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, *rest: Any) -> Tensor:
        # isolates the probe's control row (one boundary pair) and leaks everywhere else
        merged = cu if len(cu) == 2 else torch.stack([cu[0], cu[1] - 1, cu[-1]])
        return right(q, k, v, merged, *rest)

    monkeypatch.setitem(ATTENTION_BACKENDS, "cpu", Backend(blind, lambda needs: None))
    report = check_model(config("llama"))
    assert report.ways == [f"{WHOLE} sdpa"]  # which does without packed attention
    assert any("lets a document see the one before it" in note for note in report.notes)
    no_rectangles(monkeypatch)
    assert "shows no effect between documents even without a boundary" in str(check_model(config("llama")).reason)


@pytest.mark.parametrize("model_type", ["mamba", "qwen3_next", "bloom"])
def test_rectangles_that_hold_several_documents_are_found_out(
    model_type: str, config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = next(fields for name, fields, _ in KINDS if name == model_type)
    right = unflatten.plan_rectangles

    def merged(cu: np.ndarray, **more: Any) -> Rectangles:
        return right(cu if len(cu) == 2 else cu - np.array([0, 1, 0]), **more)  # one token over the boundary

    monkeypatch.setattr(unflatten, "plan_rectangles", merged)
    reason = str(check_model(config(model_type, **fields)).reason)
    assert "lets a document see the one before it" in reason


def test_a_module_whose_result_depends_on_the_padding_is_refused(
    config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.mamba.modeling_mamba import MambaMixer

    plain = MambaMixer.forward

    def depends(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(self, hidden_states, *args, **kwargs) * (1 if hidden_states.shape[1] < 14 else 1.5)

    monkeypatch.setattr(MambaMixer, "forward", depends)
    assert "where rows are padded" in str(check_model(config("mamba", state_size=4)).reason)


@pytest.mark.parametrize("honours", [True, False])
def test_kernels_that_take_boundaries_are_believed_only_if_they_keep_them(
    honours: bool, config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as home

    conv, rule = home.causal_conv1d_fn.__wrapped__, home.torch_chunk_gated_delta_rule.__wrapped__
    spans: list[tuple[int, int]] = []

    def cut(cu: Tensor | None, length: int) -> list[tuple[int, int]]:
        return list(itertools.pairwise(cu.tolist())) if honours and cu is not None else [(0, length)]

    def causal_conv1d_fn(x: Tensor, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        counts = None if seq_idx is None else torch.bincount(seq_idx[0]).cumsum(0)
        cu = None if counts is None else torch.cat([counts.new_zeros(1), counts])
        kwargs.pop("cu_seq_lens_q", None)
        return torch.cat([conv(x[..., a:b], *args, **kwargs) for a, b in cut(cu, x.shape[-1])], -1)

    def chunk_rule(*heads: Tensor, cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        gates = {name: kwargs.pop(name) for name in ("g", "beta")}
        spans[:] = cut(cu_seqlens, heads[0].shape[1])
        return torch.cat(
            [
                rule(*(x[:, a:b] for x in heads), **{k: v[:, a:b] for k, v in gates.items()}, **kwargs)[0]
                for a, b in spans
            ],
            1,
        ), None

    monkeypatch.setattr(home, "causal_conv1d_fn", causal_conv1d_fn)
    monkeypatch.setattr(home, "torch_chunk_gated_delta_rule", chunk_rule)
    fields = next(fields for name, fields, _ in KINDS if name == "qwen3_next")
    report = check_model(config("qwen3_next", **fields))
    assert report.reason is None
    how = "take the boundaries themselves" if honours else RECTANGLES
    assert f"Qwen3NextGatedDeltaNet, 1 layer: {how}" in report.text()
    assert report.unflattening.hands_over is honours


def test_attention_without_effect_proves_nothing(config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "cpu", Backend(lambda q, k, v, *rest: q * 0, lambda needs: None))
    report = check_model(config("llama"))
    assert any("isolation cannot be proven" in note for note in report.notes)
    assert report.ways == [f"{WHOLE} sdpa"]


def test_inspection_leaves_the_model_as_it_was(config: Write) -> None:
    torch.manual_seed(0)
    model = load_model(config("mistral", sliding_window=16)).model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    isolation.inspect_model(model, "again")
    assert not model.training
    assert model.config.sliding_window == 16
    assert model.config._attn_implementation == "packrow"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_fails_without_a_word_is_refused_by_the_kind_of_its_failure(
    config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(config(model_type="llama")).model

    def fails(*arguments: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(isolation, "_measure", fails)
    reason = isolation.inspect_model(model, "silent").reason
    assert reason == "does not run on packed rows (NotImplementedError: NotImplementedError)"


def test_checking_disturbs_no_random_state(config: Write) -> None:
    path = config("llama")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_model(path)
    assert torch.equal(torch.rand(3), expected)


def test_learned_positions_limit_the_longest_segment(config: Write) -> None:
    learned, rotary = check_model(config("gpt2")), check_model(config("llama"))
    assert check_segments(learned, 64) == []
    with pytest.raises(ModelError, match=r"65 tokens; expected at most 64 \(its learned position table.*--seq-len 64"):
        check_segments(learned, 65)
    assert check_segments(rotary, 65) == ["the longest segment has 65 tokens; the model was made for 64"]


def test_a_model_of_8_positions_takes_rows_of_more_tokens_since_positions_restart(config: Write) -> None:
    loaded = load_model(config("gpt2", n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0))
    ids = torch.arange(3, 12)[None]
    kwargs = {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]), **probe.packed_kwargs([5, 4], ids.device)}
    packed = loaded.model(input_ids=ids, **kwargs).logits[0]
    loaded.model.set_attn_implementation("eager")
    alone = [loaded.model(input_ids=part, use_cache=False).logits[0] for part in (ids[:, :5], ids[:, 5:])]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_rotary_frequencies_that_follow_the_longest_document_limit_segments(config: Write) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    fields = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    report = check_model(config("phi3", rope_parameters=rope, **fields))
    assert report.accepted
    with pytest.raises(ModelError, match="rotary frequencies for every document depend on the longest one"):
        check_segments(report, 65)


def test_a_model_that_sees_later_tokens_is_refused_for_rectangles_too(config: Write) -> None:
    path = config("bert")
    with pytest.raises(ModelError, match=r"its attention is not causal; expected a causal language model"):
        load_model(path, packed=False)


def test_experts_are_probed_also_where_they_come_after_dense_layers_and_are_chosen_by_groups(config: Write) -> None:
    fields = LATENT | {"n_routed_experts": 64, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
    routed: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: routed.append(type(module).__name__))
    report = check_model(config("deepseek_v3", **fields | {"first_k_dense_replace": 3}, num_hidden_layers=5))
    hook.remove()
    assert report.reason is None
    assert report.num_layers == 2  # one dense, one of experts
    assert "DeepseekV3MoE" in routed
    assert load_model(config("deepseek_v3", **fields)).report.accepted


def test_a_window_as_long_as_the_positions_is_none(config: Write) -> None:
    report = check_model(config("phimoe", **EXPERTS, sliding_window=64))
    assert report.ways == ["PhimoeAttention (heads of 8), 2 layers: packed attention"]
