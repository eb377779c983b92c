"""One training process, run by path: `jobs`, `rank`, `world_size` and `rendezvous` come as globals.

A job is the fields of a TrainConfig, and optionally `kill`: where the process ends itself with SIGKILL,
or `ask`: rank, step and signal of a request to stop, while it takes a step; `ask_in_save`: the same, while the
checkpoint of that step is written.
"""

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

import trainer.loop
import trainer.saving.checkpoint
from trainer.config import TrainConfig

jobs: list[dict[str, Any]] = globals()["jobs"]
rank: int = globals()["rank"]
world_size: int = globals()["world_size"]
rendezvous: str = globals()["rendezvous"]


def die() -> None:
    """End this process as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(kill: tuple[str, int]) -> None:
    """Arrange for death: after the weights of a step moved, or between a checkpoint's files and its rename."""
    place, step = kill
    if place == "step":
        take_step = trainer.loop.take_step

        def dying_step(run: Any, *rest: Any) -> Any:
            result = take_step(run, *rest)
            return die() if run.step == step else result

        trainer.loop.take_step = dying_step
    else:
        publish = trainer.saving.checkpoint.Checkpoints._publish

        def dying_publish(self: Any, temporary: Any, final: Any, content: Any, best: bool) -> None:
            return die() if content["step"] == step else publish(self, temporary, final, content, best)

        trainer.saving.checkpoint.Checkpoints._publish = dying_publish


def arm_signal(asked_rank: int, step: int, number: int) -> None:
    """Arrange for a signal to one process, while it takes a step."""
    take_step = trainer.loop.take_step

    def signalled_step(run: Any, *rest: Any) -> Any:
        if rank == asked_rank and run.step == step:
            os.kill(os.getpid(), number)
        return take_step(run, *rest)

    trainer.loop.take_step = signalled_step


def arm_signal_in_save(asked_rank: int, step: int, number: int, last: int) -> None:
    """Arrange for a signal to one process, while it writes its part of a checkpoint (of the last, at its end)."""
    write, close = trainer.saving.checkpoint.write, trainer.saving.checkpoint.Checkpoints.close
    closing = threading.Event()

    def noted_close(self: Any) -> None:
        closing.set()
        close(self)

    def signalled_write(staged: Any, path: Any) -> None:
        if rank == asked_rank and path.parent.name == f"_tmp-step-{step:08d}":
            if step == last:
                closing.wait()
            os.kill(os.getpid(), number)
        write(staged, path)

    trainer.saving.checkpoint.Checkpoints.close = noted_close
    trainer.saving.checkpoint.write = signalled_write


torch.set_num_threads(1)
if world_size > 1:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
for job in jobs:
    if "kill" in job:
        arm(job.pop("kill"))
    if "ask" in job:
        arm_signal(*job.pop("ask"))
    if "ask_in_save" in job:
        arm_signal_in_save(*job.pop("ask_in_save"), job["steps"])
    trainer.loop.train(TrainConfig(**job))
if world_size > 1:
    dist.destroy_process_group()
