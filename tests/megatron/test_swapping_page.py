"""The worked examples of the documentation run as they stand, and stay short."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "swapping.md"


def test_worked_example(tmp_path):
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(programs) == 2
    assert all(len(program.splitlines()) < 40 for program in programs)
    script = tmp_path / "example.py"
    script.write_text("\n".join(programs))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    policies, loss, third = done.stdout.strip().splitlines()
    assert policies == "{1: 'bf16', 2: 'nvfp4_qk_fp8_pv', 3: 'nvfp4_qk_fp8_pv', 4: 'bf16'}"
    assert 5 < float(loss) < 6.5
    without_us, with_us = map(float, third.split())
    assert without_us < float(loss) - 0.1
    assert abs(with_us / without_us - 1) < 0.01
