"""The loop on a GPU: no host sync in a step, and the losses of the CPU."""

import pytest
import torch

from trainer import distributed
from trainer.config import TrainConfig
from trainer.loop import LogInterval, take_step, train
from trainer.run import set_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def config(dataset, model_config, tmp_path):
    def make(**fields) -> TrainConfig:
        chosen = {
            "dataset": str(dataset.path), "model": model_config(hidden_size=128, num_attention_heads=2),
            "out": str(tmp_path / f"run-{len(list(tmp_path.iterdir()))}"), "steps": 8, "packs_per_step": 4, "lr": 1e-3,
            "device": "cuda", "log_every": 4,
        }  # fmt: skip
        return TrainConfig(**chosen | fields)

    return make


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_never_waits_for_the_device(config, compiled):
    settings = config(compile=compiled, liger="off")
    run = set_up(settings, distributed.start("cuda"))
    interval = LogInterval(torch.zeros((), device="cuda"))
    batches = run.loader.forever()
    for _ in range(3):
        take_step(run, batches, interval)
        run.step += 1
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            take_step(run, batches, interval)
            run.step += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
        batches.close()
        run.metrics.close()
    assert int(run.bad_step) == -1


def test_bf16_on_the_gpu_is_near_fp32_on_the_cpu(config):
    assert train(config()).loss == pytest.approx(train(config(device="cpu", dtype="fp32")).loss, rel=0.02)
