"""What loading a model checks, refuses and says."""

import ast
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import nn

from shards.errors import ModelError
from trainer.model import loading
from trainer.model.loading import check_model, check_segments, check_vocabulary, load_config, load_model
from trainer.model.loss import PackedLM

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Write = Callable[..., str]


def test_an_encoder_decoder_is_not_sent_to_another_dataset(config: Write) -> None:
    path = config("t5")
    with pytest.raises(ModelError, match=r"\(t5\): the model is an encoder-decoder.* Use another model\.$"):
        load_model(path)


def test_attention_dropout_is_set_to_zero_and_said(config: Write) -> None:
    loaded = load_model(config("gpt2", attn_pdrop=0.2, resid_pdrop=0.3))
    assert "attention dropout 0.2 (attn_pdrop) is set to 0: variable-length kernels have none" in loaded.notes
    assert (loaded.model.config.attn_pdrop, loaded.model.config.resid_pdrop) == (0.0, 0.3)
    assert loaded.model.training


def test_the_choice_of_attention_is_among_the_notes(config: Write) -> None:
    loaded = load_model(config("llama"), compute_dtype=torch.bfloat16)
    assert loaded.backend == "cpu"
    assert "attention torch: passed over, runs on CUDA devices only, the model is on cpu" in loaded.notes
    with pytest.raises(ModelError, match='`attention="flash-attn"`: passed over'):
        load_model(config("llama"), attention="flash-attn")


def test_ligers_layers_need_a_gpu(config: Write) -> None:
    assert any("liger kernels: passed over" in note for note in load_model(config("llama")).notes)
    with pytest.raises(ModelError, match='`liger="on"`: liger kernels run on CUDA devices only'):
        load_model(config("llama"), liger="on")


@pytest.mark.parametrize("name", ["./absent", "../absent", "runs/first/absent", "~/absent", "absent/config.json"])
def test_a_path_that_leads_nowhere_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match=f"^{name}: no such file or directory; expected a model"):
        load_config(name)


def test_a_hub_that_cannot_be_reached_is_one_line_without_its_clients_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    client, lines = logging.getLogger("huggingface_hub.utils._http"), []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lines.append)

    def unreachable(*_: object, **__: object) -> None:
        client.warning("Retrying in 1s [Retry 1/5].")
        raise huggingface_hub.errors.OfflineModeIsEnabled("Name or service not known")

    monkeypatch.setattr(huggingface_hub.file_download, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    client.addHandler(handler)
    try:
        with pytest.raises(ModelError) as caught:
            load_config("nonexistent/foo")
        assert lines == []
        client.warning("said outside")
        assert len(lines) == 1
    finally:
        client.removeHandler(handler)
    assert str(caught.value) == (
        "nonexistent/foo: no such directory, and the hub cannot be reached. Check the path, or the network."
    )


@pytest.mark.parametrize("model_type", ["bloom", "mamba"])
def test_a_refused_model_still_trains_on_rectangles(
    model_type: str, config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("trainer.model.loading.refusal", lambda config: "is refused")
    loaded = load_model(config(model_type, state_size=4), packed=False)
    assert loaded.backend is None
    assert "rows hold one document each and run on native attention" in loaded.notes[0]
    packed = PackedLM(loaded.model, backend=None, plain_head=loaded.report.plain_head)
    lengths = [5, 9]
    ids, labels = torch.zeros(2, 9, dtype=torch.int64), torch.full((2, 9), -100)
    generator = torch.Generator().manual_seed(0)
    alone = torch.zeros(())
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, 97, (length,), generator=generator)
        labels[row, : length - 1] = ids[row, 1:length]
        logits = loaded.model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0, :-1]
        alone += nn.functional.cross_entropy(logits, ids[row, 1:length], reduction="sum")
    rectangle = {"input_ids": ids, "shift_labels": labels, "cu_seqlens": torch.tensor([0, 9, 18], dtype=torch.int32)}
    torch.testing.assert_close(packed(rectangle), alone, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_with_missing_weights_is_refused(config: Write, tmp_path: Path) -> None:
    model = load_model(config("llama", tie_word_embeddings=False)).model
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "part", state_dict=state)
    assert load_model(str(tmp_path / "whole")).report.accepted
    with pytest.raises(ModelError, match=r"1 weights are not in the checkpoint.*first lm_head\.weight"):
        load_model(str(tmp_path / "part"))


def test_a_directory_without_weights_is_sent_to_its_configuration(config: Write, tmp_path: Path) -> None:
    directory = tmp_path / "bare"
    directory.mkdir()
    (directory / "config.json").write_bytes(Path(config("llama")).read_bytes())
    with pytest.raises(ModelError) as caught:
        load_model(str(directory))
    assert str(caught.value) == (
        f"{directory}: holds no weights; expected model.safetensors. "
        f"Use a complete model, or {directory}/config.json to start from random weights."
    )
    assert load_model(f"{directory}/config.json").report.accepted
    (directory / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"cannot load a causal model: .*Check the name, and its files"):
        load_model(str(directory))


def test_a_saved_model_loads_with_its_own_weights(config: Write, tmp_path: Path) -> None:
    model = load_model(config("qwen3", head_dim=16)).model
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model")).model
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert "packrow" not in (tmp_path / "model" / "config.json").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "no model_type"),
        ("[1]", "no model_type"),
        ("{", "cannot read a model configuration"),
        ('{"model_type": "never-heard-of"}', "cannot read a model configuration"),
    ],
)
def test_a_broken_configuration_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=message) as error:
        load_config(str(path))
    assert "\n" not in str(error.value)


def test_a_directory_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read a model configuration") as error:
        load_model(str(tmp_path))
    assert "\n" not in str(error.value)


def test_an_id_beyond_the_vocabulary_is_refused_and_nothing_is_resized(config: Write) -> None:
    loaded = load_model(config("llama"))
    check_vocabulary(loaded.report, 96)
    with pytest.raises(ModelError, match="token id 97 in the dataset, but only 97 embeddings in the model"):
        check_vocabulary(loaded.report, 97)
    assert loaded.model.get_input_embeddings().weight.shape[0] == 97


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "nonsense"}, r"Unrecognized model identifier: nonsense. Check the name.$"),
        ({"model_type": "llama", "hidden_size": 60, "num_attention_heads": 7}, "size .60. is not a multiple"),
        ({"model_type": "llama", "num_hidden_layers": "two"}, "'num_hidden_layers' expected int, got str"),
    ],
)
def test_a_configuration_that_is_not_sound_is_one_line(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message) as caught:
        load_config(str(tmp_path / "model.json"))
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there_is_no_name_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        load_config(str(tmp_path / "nothing"))


def test_the_positions_of_a_model_on_native_attention_are_known(config: Write) -> None:
    path = config("gpt_neo", attention_types=[[["global"], 2]], num_layers=2, num_heads=4, attention_dropout=0.0)
    report = load_model(path, packed=False).report
    with pytest.raises(ModelError, match="the longest segment has 65 tokens; expected at most 64"):
        check_segments(report, 65)


@pytest.mark.parametrize("load", [load_config, load_model, check_model, lambda name: load_model(name, packed=False)])
def test_code_that_a_model_brings_along_is_never_run_nor_asked_about(
    load: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "configuration_evil.py").write_text(evil)
    (tmp_path / "model" / "modeling_evil.py").write_text(evil)
    auto_map = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    fields = {**SIZES, "model_type": "evil", "auto_map": auto_map}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    with pytest.raises(ModelError, match=r"brings code of its own \(auto_map\), which is never run here") as caught:
        load(str(tmp_path / "model"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_transformers_knows_is_loaded_by_transformers_own_code(config: Write, tmp_path: Path) -> None:
    load_model(config("llama")).model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "modeling_evil.py").write_text("raise SystemExit")
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    fields["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    assert type(load_model(str(tmp_path / "model")).model).__name__ == "LlamaForCausalLM"


def test_every_call_that_could_run_foreign_code_forbids_it() -> None:
    calls = []
    for path in (Path(__file__).parents[4] / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in ("from_pretrained", "from_config") and owner.lower().startswith("auto"):
                    calls.append((path.name, {key.arg: ast.unparse(key.value) for key in node.keywords}))
    assert {name for name, _ in calls} >= {"loading.py", "demo.py"}
    assert [name for name, keywords in calls if keywords.get("trust_remote_code") != "False"] == []


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes"])
def test_quantized_weights_are_refused_in_one_line(method: str, config: Write) -> None:
    path = config("llama", quantization_config={"quant_method": method, "bits": 4})
    for load in (load_model, check_model, lambda name: load_model(name, packed=False)):
        with pytest.raises(ModelError, match=rf"its weights are quantized \({method}\).*not trained here; expected"):
            load(path)


def test_a_model_for_sharding_stays_in_host_memory_while_all_else_is_chosen_for_its_device(model_config, monkeypatch):
    """What does not fit one device can be trained on several: none of them ever holds it whole."""
    built, build = [], loading._build

    def noting(name: str, config: object, dtype: torch.dtype, device: torch.device, *rest: object, **more: object):
        built.append((config.num_hidden_layers, str(device)))  # type: ignore[attr-defined]
        return build(name, config, dtype, device, *rest, **more)

    monkeypatch.setattr(loading, "_build", noting)
    loaded = load_model(model_config(), device="cpu:0", host=True)
    assert built == [(2, "cpu")]
    assert {each.device for each in loaded.model.parameters()} == {torch.device("cpu")}
    load_model(model_config(), device="cpu:0")
    assert built[1:] == [(2, "cpu:0")]
