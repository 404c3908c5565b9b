"""What tests of a run look at: its events, and waiting for another process."""

import json
import time
from pathlib import Path


def events(folder, kind=None):
    """Events of a run as written, all lives, of one type or all."""
    path = Path(folder) / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [e for e in found if kind is None or e["type"] == kind]


def wait_for(condition, seconds=60):
    """Poll until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
