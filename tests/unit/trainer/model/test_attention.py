"""What `packrow` refuses, which backend it takes and why, and how it calls the kernels of others."""

import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shards import PackError
from shards.errors import ModelError
from trainer.model import attention
from trainer.model.attention import packrow
from trainer.model.backends import foreign, varlen
from trainer.model.backends.choice import disagreement, pick_backend, pick_backends
from trainer.model.backends.interface import Backend, Needs
from trainer.model.backends.registry import ATTENTION_BACKENDS

CPU = Needs(device=torch.device("cpu"), dtype=torch.float32, head_dim=8, value_dim=8)
BF16 = Needs(device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=8, value_dim=8)
CU = torch.tensor([0, 3, 5], dtype=torch.int32)
BOUNDARIES: dict[str, Any] = {"cu_seq_lens_q": CU, "max_length_q": 3}


class Layer(nn.Module):
    is_causal = True


def call(batch: int = 1, queries: int = 5, keys: int = 5, mask: Any = None, **kwargs: Any) -> torch.Tensor:
    q, k, v = torch.randn(batch, 2, queries, 8), torch.randn(batch, 1, keys, 8), torch.randn(batch, 1, keys, 8)
    return packrow(Layer(), q, k, v, mask, **{**BOUNDARIES, **kwargs})[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": torch.ones(1, 1, 5, 5)}, "attention mask"),
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q and max_length_q did not arrive"),
        ({"max_length_q": None}, "cu_seq_lens_q and max_length_q did not arrive"),
        ({"batch": 2}, "a batch of 2"),
        ({"queries": 1}, "1 queries, 5 keys; expected as many"),
        ({"dropout": 0.1}, "attention dropout is 0.1"),
        ({"is_causal": False}, "not causal"),
        ({"sinks": torch.zeros(2)}, "attention sinks under another name"),
        ({"position_bias": torch.zeros(1)}, "a bias on attention scores"),
        ({"never_heard_of": 1}, "'never_heard_of'"),
    ],
)
def test_what_the_kernels_would_leave_out_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        call(**arguments)


def test_what_changes_nothing_is_let_through() -> None:
    out = call(softcap=None, position_ids=torch.arange(5), use_cache=False, output_attentions=False, is_causal=True)
    assert out.shape == (1, 5, 2, 8)


def test_a_layer_that_is_not_causal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "is_causal", False)
    with pytest.raises(ModelError, match="not causal"):
        call()


def test_a_window_of_zero_or_less_means_none() -> None:
    torch.manual_seed(0)
    unlimited = call(sliding_window=None)
    for window in (0, -1):
        torch.manual_seed(0)
        assert torch.equal(call(sliding_window=window), unlimited)
    torch.manual_seed(0)
    assert not torch.equal(call(sliding_window=1), unlimited)


def test_under_autocast_attention_runs_in_the_autocast_type() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert call().dtype == torch.bfloat16
    assert call().dtype == torch.float32


def test_transformers_builds_no_mask_for_packrow() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention.register()
    assert ALL_ATTENTION_FUNCTIONS[attention.IMPLEMENTATION] is packrow
    assert attention.IMPLEMENTATION not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


def test_auto_names_a_reason_for_every_backend_passed_over() -> None:
    name, lines = pick_backend("auto", CPU)
    assert name == "cpu"
    assert [line.split(":")[0] for line in lines] == [f"attention {key}" for key in ATTENTION_BACKENDS]
    assert all("passed over, " in line for line in lines[:-1])
    assert lines[-1] == "attention cpu: chosen"


def test_a_backend_can_be_forced() -> None:
    assert pick_backend("cpu", CPU) == ("cpu", ["attention cpu: asked for"])


def test_a_forced_backend_that_cannot_serve_is_an_error() -> None:
    with pytest.raises(
        PackError, match=r'`attention="torch"`: passed over, runs on CUDA devices only.*Use `attention="auto"`'
    ):
        pick_backend("torch", CPU)


def test_an_unknown_backend_is_an_error_that_names_the_others() -> None:
    with pytest.raises(
        PackError,
        match=r"`attention`: 'flash'; expected one of auto, flash-attn-4, flash-attn-3, flash-attn, torch, flex, cpu\.",
    ):
        pick_backend("flash", CPU)


def segment_loop(shift: int = 0, merge: bool = False) -> Backend:
    """The segment loop with a window that is off by `shift`, or blind to boundaries."""

    def attend(q: Any, k: Any, v: Any, cu: Any, longest: int, window: int | None, *rest: Any) -> torch.Tensor:
        cu = torch.stack([cu[0], cu[-1]]) if merge else cu
        window = None if window is None else window + shift
        return ATTENTION_BACKENDS["cpu"](q, k, v, cu, longest, window, *rest)

    return Backend(attend, lambda needs: None)


def test_a_backend_that_agrees_is_found_to_agree() -> None:
    assert disagreement(segment_loop(), BF16) is None
    assert disagreement(segment_loop(), replace(BF16, sliding_window=4096)) is None
    assert disagreement(segment_loop(), replace(BF16, softcap=3.0, sinks=True)) is None


def test_a_backend_that_is_off_by_one_token_or_blind_to_boundaries_is_found_out() -> None:
    assert "differs from plain attention" in str(disagreement(segment_loop(shift=1), replace(BF16, sliding_window=50)))
    assert "differs from plain attention" in str(disagreement(segment_loop(merge=True), BF16))


class KernelRefused(Exception):
    """A class of its own, as kernels' compilers raise them."""


@pytest.mark.parametrize("broken", range(3), ids=["dq", "dk", "dv"])
def test_a_gradient_that_is_no_number_is_found_out(broken: int) -> None:
    def attend(*heads: Any) -> torch.Tensor:
        bad = heads[broken]
        bad.register_hook(lambda grad: grad.masked_fill(torch.arange(len(grad))[:, None, None] == 17, float("nan")))
        return ATTENTION_BACKENDS["cpu"](*(x + 0 if x is bad else x for x in heads))

    def run(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
        heads = [q, k, v]
        heads[broken] = heads[broken] * 1.0
        return attend(*heads, *rest)

    assert "differs from plain attention by nan" in str(disagreement(Backend(run, lambda needs: None), BF16))


def test_what_a_kernel_raises_is_a_reason_whatever_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> torch.Tensor:
        raise KernelRefused("no tile of this width\nand much more")

    monkeypatch.setitem(ATTENTION_BACKENDS, "flash-attn-4", Backend(refuses, lambda needs: None))
    name, lines = pick_backend("auto", CPU, prove=True)
    assert name == "cpu"
    assert lines[0].endswith("passed over, fails on this machine (KernelRefused: no tile of this width)")


def test_the_proof_runs_the_heads_and_windows_of_the_run_and_its_empty_segments() -> None:
    seen: list[tuple[int, int, int | None, list[int]]] = []

    def attend(q: Any, k: Any, v: Any, cu: Any, longest: int, window: int | None, *rest: Any) -> torch.Tensor:
        seen.append((q.shape[1], k.shape[1], window, cu.diff().tolist()))
        return ATTENTION_BACKENDS["cpu"](q, k, v, cu, longest, window, *rest)

    watched = Backend(attend, lambda needs: None)
    for needs in (replace(CPU, num_heads=8, num_kv_heads=1), replace(CPU, num_kv_heads=4, sliding_window=16)):
        assert disagreement(watched, needs) is None
    assert [call[:3] for call in seen] == [(8, 1, None), (4, 4, 16)]
    assert all(lengths[-2:] == [0, 0] and max(lengths) > 128 for *_, lengths in seen)


@pytest.mark.parametrize("error", ["ImportError('undefined symbol')", "OSError('libcudart')", "KeyError('sm_90')"])
def test_a_package_that_does_not_import_is_passed_over_with_its_reason(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    needs = replace(BF16, device=torch.device("cuda"))
    foreign.import_reason.cache_clear()
    try:
        for name in ("flash-attn-4", "flash-attn"):
            reason = str(ATTENTION_BACKENDS[name].unsupported_reason(needs))
            assert reason.startswith(f"{name} is installed, but cannot be imported ({error.partition('(')[0]}: ")
    finally:
        foreign.import_reason.cache_clear()


def test_a_package_that_is_not_there_is_said_to_be_missing() -> None:
    assert foreign.import_reason("never_heard_of.inner", "never-heard-of") == "never-heard-of is not installed"


def test_a_backend_nobody_proved_is_said_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    needs = Needs(device=torch.device("cuda"), dtype=torch.float32, head_dim=72, value_dim=72)
    attention._default_backend.cache_clear()
    with pytest.warns(UserWarning, match="attention cpu: chosen without a check.*train in bf16 for a kernel"):
        attention._default_backend(needs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attention._default_backend(needs) == "cpu"


def test_a_model_of_two_head_widths_gets_a_backend_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Backend(ATTENTION_BACKENDS["cpu"].attend, lambda needs: "too wide" if max(needs.heads) > 256 else None)
    monkeypatch.setitem(ATTENTION_BACKENDS, "flash-attn-4", narrow)
    wide = replace(CPU, head_dim=512, value_dim=512)
    assert pick_backends("auto", [CPU]) == ("flash-attn-4", ["attention flash-attn-4: chosen"])
    chosen, lines = pick_backends("auto", [CPU, wide, replace(CPU, sliding_window=4)], prove=True)
    assert chosen == {(8, 8): "flash-attn-4", (512, 512): "cpu"}
    assert lines[0] == "heads of 8: attention flash-attn-4: chosen"
    assert lines[1] == "heads of 512: attention flash-attn-4: passed over, too wide"
    q, k, v = torch.randn(1, 2, 5, 512), torch.randn(1, 1, 5, 512), torch.randn(1, 1, 5, 512)
    assert packrow(Layer(), q, k, v, packrow_backend=chosen, **BOUNDARIES)[0].shape == (1, 5, 2, 512)


def test_a_backend_that_fails_its_proof_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setitem(ATTENTION_BACKENDS, "flash-attn-4", Backend(broken, lambda needs: None))
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch", segment_loop(shift=1))
    name, lines = pick_backend("auto", CPU, replace(CPU, sliding_window=4), prove=True)
    assert name == "cpu"
    assert "no kernel image is available" in lines[0]
    assert "differs from plain attention" in lines[3]


# Signatures as published: flash-attn 2.8.3, flash-attn 3, flash-attn-4 4.0.0b36, torch 2.10, 2.11 and 2.13.
def flash_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    ...


def flash_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    ...


def flash_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0,
):  # fmt: skip
    ...


def torch_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None): ...


def torch_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
): ...


def torch_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    ...


def stand_in(signature: Callable[..., Any], seen: list[dict[str, Any]]) -> Callable[..., torch.Tensor]:
    """A kernel of this signature that computes by the segment loop, with windows as flash kernels count them."""

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = inspect.signature(signature).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        seen.append(dict(given))
        q, k, v = (given.get(short, given.get(long)) for short, long in (("q", "query"), ("k", "key"), ("v", "value")))
        cu = given.get("cu_seqlens_q", given.get("cu_seq_q"))
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert q.shape[-1] % 8 == 0
        assert cu.dtype == torch.int32
        left = given["window_size"][0]
        window = None if left in (None, -1) else left + 1
        scale = given.get("softmax_scale", given.get("scale"))
        return ATTENTION_BACKENDS["cpu"](
            q, k, v, cu, 0, window, scale, given.get("softcap") or None, given.get("learnable_sink")
        )

    kernel.__signature__ = inspect.signature(signature)  # type: ignore[attr-defined]
    return kernel


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    return []


def install(monkeypatch: pytest.MonkeyPatch, module: str, name: str, kernel: Callable[..., Any]) -> None:
    fake = types.ModuleType(module)
    setattr(fake, name, kernel)
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.fixture(params=["flash-attn-4", "flash-attn-3", "flash-attn", "torch 2.11", "torch 2.13"])
def backend(
    request: pytest.FixtureRequest, seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backend]:
    if request.param == "flash-attn-4":
        install(monkeypatch, "flash_attn", "unused", None)
        install(monkeypatch, "flash_attn.cute", "flash_attn_varlen_func", stand_in(flash_4, seen))
    elif request.param == "flash-attn-3":
        install(monkeypatch, "flash_attn_interface", "flash_attn_varlen_func", stand_in(flash_3, seen))
    elif request.param == "flash-attn":
        install(monkeypatch, "flash_attn", "flash_attn_varlen_func", stand_in(flash_2, seen))
    else:
        signature = torch_11 if request.param == "torch 2.11" else torch_13
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in(signature, seen))
        monkeypatch.setattr(varlen, "_TORCH_VARLEN", varlen._find_torch_varlen())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    foreign.import_reason.cache_clear()
    yield ATTENTION_BACKENDS[request.param.split()[0]]
    foreign.import_reason.cache_clear()


def test_soft_caps_and_sinks_reach_the_kernels_that_have_them(backend: Backend, seen: list[dict[str, Any]]) -> None:
    q, k, v, sinks = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randn(4)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    needs = replace(BF16, device=torch.device("cuda"))
    for softcap, given in ((2.0, None), (None, sinks), (2.0, sinks)):
        asked = replace(needs, softcap=softcap, sinks=given is not None)
        if "has no" in str(backend.unsupported_reason(asked)):
            continue
        out = backend(q, k, v, cu, 5, None, 0.3, softcap, given)
        torch.testing.assert_close(out, ATTENTION_BACKENDS["cpu"](q, k, v, cu, 5, None, 0.3, softcap, given))
    assert seen or "has no soft-cap" in str(backend.unsupported_reason(replace(needs, softcap=2.0)))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_kernels_are_called_by_their_signature_with_the_current_token_counted_out_of_the_window(
    backend: Backend, seen: list[dict[str, Any]], window: int | None
) -> None:
    q, k, v = torch.randn(9, 4, 6), torch.randn(9, 2, 6), torch.randn(9, 2, 10)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = backend(q, k, v, cu, 5, window, 0.3)
    torch.testing.assert_close(out, ATTENTION_BACKENDS["cpu"](q, k, v, cu, 5, window, 0.3))
    (given,) = seen
    assert given["window_size"] in ([(None, None), (-1, -1), (-1, 0)] if window is None else [(window - 1, 0)])
    assert given.get("causal", True) is True
    assert given.get("enable_gqa", True) is True
    assert given.get("max_seqlen_q", given.get("max_q")) == 5


def test_flash_attn_3_is_passed_over_where_it_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn_interface", "flash_attn_varlen_func", None)
    foreign.import_reason.cache_clear()
    needs = replace(BF16, device=torch.device("cuda"))
    reasons = []
    for capability in ((7, 5), (8, 0), (9, 0), (10, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, found=capability: found)
        reasons.append(ATTENTION_BACKENDS["flash-attn-3"].unsupported_reason(needs))
    foreign.import_reason.cache_clear()
    assert [reason is None for reason in reasons] == [False, True, True, False]
    assert reasons[-1] == "has no kernels for compute capability 10.x; flash-attn-4 has"


def test_a_torch_without_windows_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", torch_10)
    monkeypatch.setattr(varlen, "_TORCH_VARLEN", varlen._find_torch_varlen())
    assert "has no varlen_attn with a window" in str(ATTENTION_BACKENDS["torch"].unsupported_reason(CPU))


@pytest.mark.parametrize(
    ("changes", "capability", "message"),
    [
        ({"dtype": torch.float32}, (9, 0), "bf16 or fp16 only, not in float32"),
        ({"head_dim": 320}, (9, 0), "heads up to 256 wide, these are 320"),
        ({"value_dim": 512}, (9, 0), "heads up to 256 wide, these are 512"),
        ({}, (7, 5), "needs compute capability 8.0, this GPU has 7.5"),
        ({}, (8, 0), None),
    ],
)
def test_a_kernel_says_what_it_cannot_do(
    changes: dict[str, Any], capability: tuple[int, int], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    fields = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "value_dim": 64} | changes
    reason = ATTENTION_BACKENDS["torch"].unsupported_reason(Needs(**fields))
    assert reason is None if message is None else message in str(reason)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["flash-attn-4", "flash-attn", "torch"])
def test_on_a_gpu_a_forward_waits_for_the_device_nowhere(name: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    needs = Needs(device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=64, value_dim=64)
    if reason := ATTENTION_BACKENDS[name].unsupported_reason(needs):
        pytest.skip(reason)
    from trainer.model.loss import PackedLM

    attention.register()
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packrow", dtype=torch.bfloat16).cuda()
    packed = PackedLM(model, backend=name, plain_head=True, liger="off", weighting="document")
    batch = {
        "input_ids": torch.randint(0, 512, (1, 256), device="cuda"),
        "position_ids": torch.arange(128, device="cuda").repeat(2)[None],
        "shift_labels": torch.randint(0, 512, (1, 256), device="cuda"),
        "cu_seqlens": torch.tensor([0, 128, 256], dtype=torch.int32, device="cuda"),
        "max_seqlen": 128,
    }
    packed(batch, 256.0).backward()  # compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed(batch, 256.0).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiler_does_not_trace_into_flash_attn_4(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def kernel(q: torch.Tensor, **_: Any) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())  # what the compiler traces sees True
        return q * 2

    install(monkeypatch, "flash_attn", "unused", None)
    install(monkeypatch, "flash_attn.cute", "flash_attn_varlen_func", kernel)
    q, cu = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    compiled = torch.compile(
        lambda q: ATTENTION_BACKENDS["flash-attn-4"](q, q, q, cu, 4, None, 1.0) + 1, backend="eager"
    )
    torch.testing.assert_close(compiled(q), q * 2 + 1)
    assert traced == [False]
