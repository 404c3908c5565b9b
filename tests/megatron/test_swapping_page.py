"""The worked example of the documentation runs as it stands, and stays short."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "swapping.md"


def test_worked_example(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(program.splitlines()) < 40
    script = tmp_path / "example.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    policies, loss = done.stdout.strip().splitlines()
    assert policies == "{1: 'bf16', 2: 'nvfp4_qk_fp8_pv', 3: 'nvfp4_qk_fp8_pv', 4: 'bf16'}"
    assert 5 < float(loss) < 6.5
