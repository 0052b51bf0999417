"""A run as JSON: enough to read it, repeat it and compare it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tandem.loadgen.metrics import Summary
from tandem.loadgen.timeline import Timeline


class MachineDescription(msgspec.Struct, frozen=True):
    """The machine of the generator, and of the server if that is local."""

    processor: str
    cores: int
    system: str
    python: str

    @classmethod
    def here(cls) -> MachineDescription:
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            system=platform.platform(),
            python=platform.python_version(),
        )


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    label: str
    sent_s: float  # from the run's beginning
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    failure: str | None = None


class Report(msgspec.Struct, frozen=True):
    made_at: str
    machine: MachineDescription
    settings: dict[str, object]
    exact_lengths: bool  # whether prompts were made with the model's own tokenizer
    generator_cpu: float  # how many cores' time the generator itself took
    summaries: list[Summary]
    requests: list[RequestRecord]


def record(timeline: Timeline, began_at: float) -> RequestRecord:
    sent_s = timeline.sent_at - began_at
    if timeline.failure is not None:
        return RequestRecord(
            timeline.label, sent_s, timeline.prompt_tokens, timeline.output_tokens, failure=timeline.failure.kind
        )
    return RequestRecord(
        timeline.label,
        sent_s,
        timeline.prompt_tokens,
        timeline.output_tokens,
        ttft_ms=timeline.ttft * 1e3,
        tpot_ms=timeline.tpot * 1e3 if timeline.tpot is not None else None,
        e2e_ms=timeline.e2e * 1e3,
    )


def make_report(
    settings: dict[str, object],
    exact_lengths: bool,
    generator_cpu: float,
    summaries: list[Summary],
    timelines: Iterable[Timeline],
    began_at: float,
) -> Report:
    return Report(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=MachineDescription.here(),
        settings=settings,
        exact_lengths=exact_lengths,
        generator_cpu=generator_cpu,
        summaries=summaries,
        requests=[record(timeline, began_at) for timeline in timelines],
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
