"""Learning rates, weight decay groups, gradient norms, and what learns."""

import json
import math
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
    ],
)
def test_bad_settings_are_refused_by_their_name(fields, message):
    with pytest.raises(PackError, match=message):
        config(**fields)


def test_a_configuration_is_json():
    assert json.loads(json.dumps(config(mix=(("web", 1.0),)).to_dict()))["mix"] == [["web", 1.0]]
