"""Learning rates, weight decay groups, gradient norms, and what learns."""

import json
import math
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

from shards import PackError
from trainer.config import TrainConfig
from trainer.model.adapters import add_adapters, freeze
from trainer.model.loading import load_model
from trainer.optimizer import build_optimizer, describe_schedule, gradient_norm, learning_rate


def config(**fields) -> TrainConfig:
    return TrainConfig(dataset="d", model="m", out="o", **{"lr": 1.0, **fields})


def rates(num_steps: int, **fields) -> list[float]:
    return [learning_rate(step, num_steps, config(**fields)) for step in range(num_steps)]


def test_warm_up_rises_by_equal_parts_to_the_highest_rate():
    assert rates(8, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_cosine_starts_at_lr_passes_the_middle_and_nears_min_lr():
    values = rates(101, schedule="cosine", min_lr=0.2)
    assert values[0] == 1
    assert learning_rate(50, 100, config(schedule="cosine", min_lr=0.2)) == pytest.approx(0.6)
    assert learning_rate(100, 100, config(schedule="cosine", min_lr=0.2)) == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(values))


def test_linear_falls_by_equal_parts():
    assert rates(4, schedule="linear") == [1, 0.75, 0.5, 0.25]


def test_wsd_stays_then_falls_in_its_last_steps():
    assert rates(10, schedule="wsd", decay_steps=4) == [1] * 7 + [0.75, 0.5, 0.25]
    assert rates(10, schedule="wsd").count(1) == 9  # a fifth of the run: steps 8 and 9, the first of them still at lr


def test_the_rate_never_leaves_its_bounds():
    for schedule in ("cosine", "linear", "constant", "wsd"):
        values = rates(37, schedule=schedule, min_lr=0.1, warmup_steps=5)
        assert len(values) == 37
        assert all(0.1 <= value <= 1 for value in values[5:])


@pytest.mark.parametrize(
    ("fields", "step", "words"),
    [
        ({"schedule": "cosine", "min_lr": 0.2}, 50, "cosine from 6.00e-01 to 2.00e-01 at step 100"),
        ({"schedule": "constant"}, 3, "constant at 1.00e+00 until step 100"),
        ({"schedule": "wsd"}, 3, "constant at 1.00e+00 until step 80, then linear to 0.00e+00 at 100"),
        ({"schedule": "wsd"}, 90, "linear from 5.00e-01 to 0.00e+00 at step 100"),
        (
            {"schedule": "linear", "warmup_steps": 4},
            1,
            "warm-up from 5.00e-01 to 1.00e+00 at step 4, then linear from 1.00e+00 to 0.00e+00 at step 100",
        ),
        ({"warmup_steps": 200}, 1, "warm-up from 1.00e-02 to 1.00e+00 at step 200, beyond the last step 100"),
        ({}, 100, "over after step 100"),
    ],
)
def test_a_schedule_in_words(fields, step, words):
    assert describe_schedule(step, 100, config(**fields)) == words


def test_norms_and_biases_get_no_weight_decay(model_config):
    model = load_model(model_config("llama", attention_bias=True)).model
    optimizer = build_optimizer(model, config(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert {name for name, p in named.items() if decay[id(p)] == 0} == {
        name for name in named if "norm" in name or name.endswith("bias")
    }
    assert any(name.endswith("bias") for name in named)


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_moves_the_matrices_of_linear_layers_and_adamw_all_else(model_config):
    model = load_model(model_config("llama", tie_word_embeddings=False)).model
    optimizer = build_optimizer(model, config(optimizer="muon"))
    gradients(model, 0)
    optimizer.step()
    by_muon = {name for name, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]}
    assert by_muon == {name for name, _ in model.named_parameters() if "_proj" in name}
    assert all("exp_avg" in optimizer.state[p] for name, p in model.named_parameters() if name not in by_muon)


def test_muon_turns_a_gradient_into_a_step_without_a_preferred_direction(model_config):
    """All singular values of a step are about equal, and its mean square is about that of AdamW: 0.2 of the rate."""
    model = load_model(model_config("llama")).model
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    optimizer = build_optimizer(model, config(optimizer="muon", lr=0.1, weight_decay=0.0))
    gradients(model, 1)
    optimizer.step()
    values = torch.linalg.svdvals(before - weight.detach())
    assert values.max() / values.min() < 3  # of a random matrix it is far more
    assert float((before - weight.detach()).square().mean().sqrt()) == pytest.approx(0.2 * 0.1, rel=0.3)


def test_eight_bits_keep_a_quarter_of_the_moments_and_step_as_adamw_does():
    model = nn.Linear(256, 256)
    state_bytes, moved = [], []
    for name in ("adamw", "adamw-8bit"):
        copy = nn.Linear(256, 256)
        copy.load_state_dict(model.state_dict())
        optimizer = build_optimizer(copy, config(optimizer=name, lr=1e-2))
        for step in range(3):
            gradients(copy, step)
            optimizer.step()
        state = optimizer.state[copy.weight].values()
        state_bytes.append(sum(each.nbytes for each in state if isinstance(each, torch.Tensor)))
        moved.append(copy.weight.detach() - model.weight.detach())
    assert state_bytes[1] < 0.27 * state_bytes[0]
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[0].norm()


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix():
    model = nn.Linear(48, 32)
    optimizer = build_optimizer(model, config(optimizer="adafactor"))
    gradients(model, 0)
    optimizer.step()
    sizes = {key: value.numel() for key, value in optimizer.state[model.weight].items() if torch.is_tensor(value)}
    assert sizes["exp_avg_sq_row"] + sizes["exp_avg_sq_col"] == 48 + 32
    assert "exp_avg" not in sizes


def test_an_optimizer_that_needs_what_is_not_there_says_what_to_do(monkeypatch, model_config):
    model = load_model(model_config("llama")).model
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(PackError, match=r"has no Muon; expected one that has\. Run pip install --upgrade torch"):
        build_optimizer(model, config(optimizer="muon"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(PackError, match=r"bitsandbytes is not installed\. Run pip install bitsandbytes"):
        build_optimizer(model, config(optimizer="adamw-8bit"))


def test_muon_without_a_matrix_to_move_is_refused(model_config):
    model = load_model(model_config("llama")).model
    freeze(model, ("*_proj*",))
    with pytest.raises(PackError, match="no matrix of a linear layer is trained"):
        build_optimizer(model, config(optimizer="muon"))


def test_clipping_scales_all_gradients_by_one_factor():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), -1.0)
    assert float(gradient_norm(parameters, 0)) == pytest.approx(4.0)
    assert float(gradient_norm(parameters, 2.0)) == pytest.approx(4.0)
    assert parameters[0].grad.tolist() == pytest.approx([1.0] * 3, rel=1e-5)
    assert float(gradient_norm(parameters, 0)) == pytest.approx(2.0, rel=1e-5)


def test_freezing_is_by_pattern_and_a_pattern_without_match_is_refused(model_config):
    model = load_model(model_config()).model
    freeze(model, ("model.embed_tokens.*", "*.layers.0.*"))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert frozen == {n for n, _ in model.named_parameters() if "embed_tokens" in n or ".layers.0." in n}
    with pytest.raises(PackError, match="matches no parameter"):
        freeze(model, ("encoder.*",))


def test_a_model_without_anything_to_learn_is_refused(model_config):
    model = load_model(model_config()).model
    freeze(model, ("*",))
    with pytest.raises(PackError, match="every parameter is frozen"):
        build_optimizer(model, config())


def test_adapters_alone_learn_and_start_as_no_change(model_config):
    model = load_model(model_config()).model
    adapted = add_adapters(model, config(lora_rank=2))
    learning = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert learning
    assert all("lora_" in name for name in learning)
    assert all(not p.any() for name, p in adapted.named_parameters() if "lora_B" in name)


def test_adapter_targets_that_do_not_exist_are_refused(model_config):
    with pytest.raises(PackError, match="--lora-targets: nowhere"):
        add_adapters(load_model(model_config()).model, config(lora_rank=2, lora_targets=("nowhere",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "step"}, "`schedule`: 'step'; expected one of cosine"),
        ({"steps": 0}, "`steps`: 0; expected at least 1"),
        ({"lr": math.inf}, "`lr`: inf"),
        ({"clip": -1.0}, "`clip`: -1.0"),
        ({"epochs": 0.0}, "`epochs`: 0.0"),
        ({"dtype": "fp16"}, "`dtype`: 'fp16'"),
        ({"eval_every": 2}, "Add `eval`"),
        ({"optimizer": "adafactor", "shard": "full"}, "needs whole tensors.*expected adamw or muon"),
        ({"optimizer": "adamw-8bit", "shard": "full"}, "needs whole tensors.*expected adamw or muon"),
    ],
)
def test_bad_settings_are_refused_by_their_name(fields, message):
    with pytest.raises(PackError, match=message):
        config(**fields)


def test_a_configuration_is_json():
    assert json.loads(json.dumps(config(mix=(("web", 1.0),)).to_dict()))["mix"] == [["web", 1.0]]
