"""The KV events that a node publishes, read by the classes of an installed vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from tandem.wire.kv_events import KVEventBatch
from tests.node.kv_events.test_kv_event_publisher import EVENTS


def test_vllms_classes_read_every_event(tmp_path: Path) -> None:
    vllm = os.environ.get("VLLM", "")
    if not vllm:
        pytest.skip("VLLM=/path/to/vllm names its command: it is gigabytes, and not installed here")
    batch = tmp_path / "batch"
    batch.write_bytes(msgspec.msgpack.encode(KVEventBatch(1.5, EVENTS)))
    done = subprocess.run(
        [Path(vllm).with_name("python"), "-P", Path(__file__).with_name("kv_events_of_vllm.py"), batch],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert [name for name, _ in read] == [type(event).__name__ for event in EVENTS]
    for (_, found), event in zip(read, EVENTS, strict=True):
        for name, value in json.loads(json.dumps(msgspec.structs.asdict(event), default=bytes.hex)).items():
            assert found[name] == value, (name, event)
