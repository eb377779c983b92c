"""Experts compute in the type that autocast asks for."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations import moe

from trainer.model import attention
from trainer.model.experts import follow_autocast
from trainer.model.probe import packed_kwargs


def test_grouped_products_run_in_bf16_under_autocast_and_give_fp32_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    attention.register()
    seen: list[Any] = []
    original = getattr(moe._grouped_mm, "__wrapped__", moe._grouped_mm)

    def spy(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        seen.append((input.dtype, weight.dtype))
        return original(input, weight, offs)

    monkeypatch.setattr(moe, "_grouped_mm", spy)
    follow_autocast()
    follow_autocast()  # once is enough
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packrow")
    model.set_experts_implementation("grouped_mm")
    ids = torch.arange(24)[None]
    kwargs = {"position_ids": torch.arange(24)[None], **packed_kwargs([24], ids.device)}
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, **kwargs).logits.float().sum().backward()
    assert len(seen) >= 2
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert experts
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in experts)
    seen.clear()
    model(input_ids=ids, **kwargs)
    assert set(seen) == {(torch.float32, torch.float32)}
