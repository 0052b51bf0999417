"""Writes the trace of this node's scheduler, if `scheduler.trace_folder` says where."""

from __future__ import annotations

from pathlib import Path

from tandem.engine.core import Engine
from tandem.node.step_trace.file import TraceFile
from tandem.node.step_trace.records import StepTrace
from tandem.node.wings import PartContext, ServicePart


def make(context: PartContext) -> ServicePart | None:
    config, engine, settings = context.config, context.engine, context.config.engine.scheduler
    if not isinstance(engine, Engine) or not settings.trace_folder:
        return None
    file = TraceFile(Path(settings.trace_folder), config.node_id, settings.trace_bytes)
    engine.scheduler.watch_with(StepTrace(config.node_id, file.write))
    return StepTracePart(file)


class StepTracePart(ServicePart):
    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def stop(self) -> None:
        self._file.close()
