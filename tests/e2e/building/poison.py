"""Workers that die: stand-ins for `_start_worker` and `_ray_task` of `pipeline.building.engines`.

Beside the output directory lies `poison.json`: the window whose worker kills itself, and how many times it does.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

from pipeline.building import engines
from pipeline.building.window import Job, Task

start_worker, ray_task, run_window = engines._start_worker, engines._ray_task, engines.run_window


def start_poisoned_worker(*arguments: Any) -> None:
    engines.run_window = run_poisoned_window
    start_worker(*arguments)


def run_poisoned_ray_task(job: Job, task: Task) -> dict[str, Any]:
    engines.run_window = run_poisoned_window
    return ray_task(job, task)


def run_poisoned_window(job: Job, task: Task, *rest: Any) -> dict[str, Any]:
    poison = Path(job.out).parent / "poison.json"
    plan = json.loads(poison.read_text())
    if task.window == plan["window"] and plan["times"]:
        poison.write_text(json.dumps(plan | {"times": plan["times"] - 1}))
        os.kill(os.getpid(), signal.SIGKILL)
    return run_window(job, task, *rest)
