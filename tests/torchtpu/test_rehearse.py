"""``tpuscope rehearse``: a script that knows nothing of this project, in a process of its own."""

import subprocess
import sys

SCRIPT = """
import sys
import torch

x = torch.ones(4, device="tpu")
print((x + 1).sum().item(), sys.argv[1:])
"""


def test_a_script_runs_on_the_device_tpu(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tpuscope", "rehearse", str(script), "--", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["8.0 ['--help']"]
    assert "no TPU is used" in done.stderr
    assert "programs compiled" in done.stderr
