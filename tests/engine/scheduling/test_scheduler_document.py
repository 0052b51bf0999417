"""The document's example is a program, and it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.request import Request
from tandem.engine.scheduling.output import ModelOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorMetadata, ConnectorOutput, Handoff, SchedulerConnector
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

NAMES = (
    AttentionKind, CacheConfig, ConnectorMetadata, ConnectorOutput, Handoff, KVCacheGroup, ModelOutput, Request,
    RequestFacts, SamplingParams, Scheduler, SchedulerConfig, SchedulerConnector
)  # fmt: skip


def test_the_documents_example_runs():
    document = Path(__file__).parents[3] / "docs" / "scheduler.md"
    (program,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    found: dict[str, Any] = {name.__name__: name for name in NAMES}
    exec(program, found)
    assert not found["scheduler"].has_unfinished_requests()
    found["scheduler"].check_integrity()
