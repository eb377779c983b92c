"""Whole training steps on tensors of device "cuda": no value is read back, no host tensor or wrong dtype gets in."""

import pytest

WINDOW = {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 8}
LONGROPE = {
    "model_type": "phi3", "original_max_position_embeddings": 128, "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4, "factor": 2.0,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
MOE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
KERNELS = ("flash-attn-4", "flash-attn-3", "flash-attn", "torch")

# Configurations of transformers whose own forward reads a value back in every step, and where it does.
EXCEPTIONS = {
    "dynamic rotary embedding": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "dynamic_frequency_update",
    ),
    "JetMoE": (
        {"model_type": "jetmoe", "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
        "modeling_jetmoe",
    ),
}  # fmt: skip


def assert_took_steps(results, names):
    assert set(results) == set(names)
    assert {name: result for name, result in results.items() if "failed" in result} == {}
    for result in results.values():
        assert result["steps"] == 3
        assert result["state_devices"] == ["cuda:0"]


def test_a_step_reads_nothing_back_whatever_the_kernel(rehearse):
    jobs = {f"{kernel} {dtype}": {"backend": kernel, "config": {"dtype": dtype}}
            for kernel in KERNELS for dtype in ("bf16", "bf16-pure")}  # fmt: skip
    results = rehearse(jobs)
    assert_took_steps(results, jobs)
    assert {tuple(result["linear_dtypes"]) for result in results.values()} == {("torch.bfloat16",)}


def test_a_step_reads_nothing_back_whatever_the_model_and_the_settings(rehearse):
    jobs = {
        "windows and query norms": {"model": WINDOW},
        "learned positions": {"model": GPT2},
        "rotary embeddings of two ranges": {"model": LONGROPE},
        "tied head": {"model": {"model_type": "qwen3", "tie_word_embeddings": True}},
        "accumulation": {"config": {"packs_per_step": 2}},
        "static shapes": {"config": {"compile": True}, "eager": True},
        "weights by document, z-loss": {"config": {"loss_weighting": "document", "z_loss": 1e-4}},
        "checkpointed activations": {"config": {"activation_checkpointing": True}},
        "adapters": {"config": {"lora_rank": 2}},
        "losses by source": {"config": {"by_source": True}},
        "losses by source under a head with adapters": {
            "config": {"by_source": True, "lora_rank": 2, "lora_targets": ["lm_head"]}
        },
        "frozen body": {"config": {"freeze": ["model.layers.*"]}},
    }
    assert_took_steps(rehearse({name: {"backend": "flash-attn-4"} | job for name, job in jobs.items()}), jobs)


def test_experts_compute_in_the_type_of_autocast(rehearse):
    results = rehearse({"experts": {"backend": "torch", "model": MOE}})
    assert_took_steps(results, ["experts"])
    assert results["experts"]["grouped_dtypes"] == ["torch.bfloat16"]


@pytest.mark.parametrize(
    ("sabotage", "failure"),
    [
        ("item", "DataDependentOutputException"),
        ("tolist", "DataDependentOutputException"),
        ("boolean index", "DynamicOutputShapeException"),
        ("host tensor", "FakeTensorDeviceMismatchError"),
        ("fp32 heads", "AssertionError"),
    ],
)
def test_the_rehearsal_notices(rehearse, sabotage, failure):
    result = rehearse({"broken": {"backend": "flash-attn-4", "sabotage": sabotage}})["broken"]
    assert result["failed"] == failure, result


def test_models_that_read_a_value_back_are_known_and_still_do(rehearse):
    results = rehearse({name: {"backend": "torch", "model": model} for name, (model, _) in EXCEPTIONS.items()})
    assert {name: result.get("read") for name, result in results.items()} == dict.fromkeys(EXCEPTIONS, True), results
    for name, (_, place) in EXCEPTIONS.items():
        assert place in results[name]["trace"]


def test_chunked_layers_and_flex_read_the_boundaries_back(rehearse):
    chunks = {"model_type": "llama4_text", "attention_chunk_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    jobs = {"chunks": {"backend": "torch", "model": chunks}, "flex": {"backend": "flex"}}
    results = rehearse(jobs)
    assert results["chunks"]["at"].endswith((":_chunked", ":chunk_offsets")), results["chunks"]
    assert results["flex"]["at"].endswith(":block_mask"), results["flex"]


def test_the_loop_over_segments_waits_for_the_device(rehearse):
    result = rehearse({"loop": {"backend": "cpu"}})["loop"]
    assert result["read"]
    assert result["at"].endswith("segments.py:attend")
