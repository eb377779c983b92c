"""FlexAttention's gradients on a GPU, as far as shapes tell: every width, window, soft-cap and sink gets one."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CASES = {
    "narrow heads": {"width": 64},
    "heads that no flash kernel takes": {"width": 512},
    "a window": {"width": 64, "window": 50},
    "soft-cap": {"width": 64, "softcap": 30.0},
    "sinks that learn": {"width": 64, "sinks": True},
}


def test_flex_attention_has_a_gradient_for_all_that_learns(fake_device):
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "differentiate_flex.py")], input=json.dumps(CASES), capture_output=True, text=True,
        env=os.environ | {"LD_PRELOAD": str(fake_device), "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(CASES)
