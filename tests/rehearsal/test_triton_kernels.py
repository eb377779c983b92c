"""liger's kernels give the numbers of plain torch, run by Triton's interpreter on a CPU.

`make rehearsal` unpacks triton and liger-kernel into .rehearsal/packages; without them there is nothing to run.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".rehearsal" / "packages"
KERNELS = {"rms_norm", "swiglu", "geglu", "rope", "fused loss"}


def test_ligers_kernels_are_plain_torch_forward_and_backward():
    installed = all(importlib.util.find_spec(name) for name in ("triton", "liger_kernel"))
    if not (installed or PACKAGES.exists()):
        pytest.skip("triton and liger-kernel are neither installed nor in .rehearsal: make rehearsal")
    path = os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpret.py"))], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert set(differences) == KERNELS
    assert {name: value for name, value in differences.items() if not value < 5e-6} == {}
