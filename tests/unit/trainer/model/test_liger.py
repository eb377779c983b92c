"""liger's layers stay only where they change nothing, and its loss runs only where it gives every gradient."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from shards.errors import ModelError
from trainer.model import attention, liger, loss
from trainer.model.backends import foreign
from trainer.model.liger import fused_cross_entropy, replace_layers
from trainer.model.loss import PackedLM

CUDA = torch.device("cuda")


def llama(activation: str) -> Any:
    attention.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        hidden_act=activation,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="packrow")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A liger-kernel whose feed-forward layers compute SiLU, whatever the model computes."""

    def apply(model: Any, **_: Any) -> None:
        for layer in model.model.layers:
            mlp = layer.mlp
            mlp.forward = lambda x, mlp=mlp: mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        sys.modules[type(model).__module__].rotate_half = lambda x: rotate(x) * 1.0  # type: ignore[attr-defined]

    from transformers.models.llama import modeling_llama

    rotate = modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", rotate)
    home = types.ModuleType("liger_kernel.transformers.monkey_patch")
    home.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[attr-defined]
    home._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    foreign.import_reason.cache_clear()
    yield
    foreign.import_reason.cache_clear()


def test_layers_that_compute_the_same_stay(installed: None) -> None:
    model = llama("silu")
    assert replace_layers(model, "auto", CUDA, random=True) == ["liger kernels: in place"]
    assert "forward" in vars(model.model.layers[0].mlp)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_layers_with_another_activation_are_taken_out_again(activation: str, installed: None) -> None:
    from transformers.models.llama import modeling_llama

    model, rotate = llama(activation), modeling_llama.rotate_half
    weights = {name: p.clone() for name, p in model.named_parameters()}
    (line,) = replace_layers(model, "auto", CUDA, random=True)
    assert line.startswith("liger kernels: passed over, its layers change the model's logits by ")
    assert f"(activation {activation})" in line
    assert "forward" not in vars(model.model.layers[0].mlp)
    assert modeling_llama.rotate_half is rotate
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    with pytest.raises(ModelError, match="its layers change the model's logits"):
        replace_layers(llama(activation), "on", CUDA, random=True)


def test_a_liger_that_does_not_import_is_passed_over(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("raise OSError('libtriton.so')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    foreign.import_reason.cache_clear()
    try:
        (line,) = replace_layers(llama("silu"), "auto", CUDA)
    finally:
        foreign.import_reason.cache_clear()
    assert line == (
        "liger kernels: passed over, liger-kernel is installed, but cannot be imported (OSError: libtriton.so)"
    )


def test_under_autocast_the_head_is_cast_once_before_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def kernel(hidden: Any, weight: Any, labels: Any, **_: Any) -> torch.Tensor:
        seen.append((hidden.dtype, weight.dtype, torch.is_autocast_enabled("cpu")))
        return (hidden @ weight.T).float().sum()

    home = types.ModuleType("liger_kernel.transformers.functional")
    home.liger_fused_linear_cross_entropy = kernel  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    weight = torch.randn(7, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        fused_cross_entropy(torch.randn(5, 4), weight, None, torch.zeros(5), 0.0).backward()
    assert seen == [(torch.bfloat16, torch.bfloat16, False)]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("frozen", [False, True])
def test_ligers_loss_runs_only_where_hidden_states_want_gradients(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    plain = loss.linear_cross_entropy

    def fused(hidden: Any, weight: Any, bias: Any, labels: Any, z_loss: float) -> torch.Tensor:
        calls.append(1)
        return plain(hidden, weight, bias, labels, None, z_loss)

    monkeypatch.setattr(loss, "fused_cross_entropy", fused)
    monkeypatch.setattr(loss, "unusable_reason", lambda: None)
    model = llama("silu")
    model.model.requires_grad_(not frozen)
    model.model.register_forward_hook(
        lambda module, args, out: out.__setitem__("last_hidden_state", out.last_hidden_state.as_subclass(OnGpu))
    )
    batch = {
        "input_ids": torch.arange(6)[None], "position_ids": torch.arange(6)[None],
        "shift_labels": torch.arange(1, 7)[None], "cu_seqlens": torch.tensor([0, 6], dtype=torch.int32),
        "max_seqlen": 6,
    }  # fmt: skip
    PackedLM(model, backend="cpu", plain_head=True)(batch).as_subclass(torch.Tensor).backward()
    assert calls == ([] if frozen else [1])
    assert model.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad.abs().max() > 0
    assert liger.unusable_reason is not loss.unusable_reason
