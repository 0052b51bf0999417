"""Reads the steps in a scheduler trace's files. A trace can be larger than memory, so a step is read only when it is shown. The files are
mapped once, because a node that serves puts another one in their place when one is full."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.node.step_trace.records import (
    PrefixCacheEvent,
    RecordsLost,
    StepDecision,
    StepSnapshot,
    TraceHeader,
    TraceRecord,
)

_END = ".jsonl"
_OLD = ".old.jsonl"


class _Line(msgspec.Struct):
    """The fields that tell which record a line is."""

    event: str
    step: int = -1


@dataclasses.dataclass(slots=True, frozen=True)
class TracedStep:
    header: TraceHeader | None  # None: it was overwritten
    snapshot: StepSnapshot
    prefixes: list[PrefixCacheEvent]
    decision: StepDecision
    lost: int  # records before it that were dropped, because the disk was too slow

    def names(self, request_id: str) -> bool:
        """Returns whether a request whose id begins with this took part in the step."""
        decision = self.decision
        named = (
            *decision.num_scheduled_tokens,
            *(one for eviction in decision.preempted for one in (eviction.request_id, eviction.for_request)),
            *decision.finished,
            *decision.loads,
            decision.held_back,
        )
        return any(name.startswith(request_id) for name in named)


@dataclasses.dataclass(slots=True, frozen=True)
class _Place:
    file: int
    offset: int
    size: int
    header: TraceHeader | None
    lost: int
    step: int


class TraceReader:
    """Numbers the steps by their place in the trace, from 0: a node that was restarted counts its own steps from 0 again."""

    def __init__(self, path: Path) -> None:
        self._files = [file for file in files_of(path) if file.stat().st_size]
        self._contents = [_mapped(file) for file in self._files]
        self._places: list[_Place] = []
        header: TraceHeader | None = None
        for index in range(len(self._files)):
            header = self._index(index, header)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> TracedStep:
        at = self._places[place]
        lines = self._contents[at.file][at.offset : at.offset + at.size].splitlines()
        records = [msgspec.json.decode(line, type=TraceRecord) for line in lines]
        snapshot = next(record for record in records if isinstance(record, StepSnapshot))
        decision = next(record for record in records if isinstance(record, StepDecision))
        prefixes = [record for record in records if isinstance(record, PrefixCacheEvent)]
        return TracedStep(at.header, snapshot, prefixes, decision, at.lost)

    def __iter__(self) -> Iterator[TracedStep]:
        return (self[place] for place in range(len(self)))

    def place_of(self, step: int) -> int:
        """Returns the place of the step with this number; of the last one if a restart made several. Raises ConfigurationError."""
        for place in reversed(range(len(self))):
            if self._places[place].step == step:
                return place
        first, last = (self._places[0].step, self._places[-1].step) if self._places else (0, 0)
        raise ConfigurationError(
            f"the trace has no step {step}: it has {len(self)} steps, from {first} to {last}; steps that changed nothing are not recorded"
        )

    def find(self, condition: Callable[[TracedStep], bool], after: int) -> int | None:
        """Returns the first place after `after` whose step meets the condition; None if there is none."""
        return next((place for place in range(after + 1, len(self)) if condition(self[place])), None)

    def _index(self, index: int, header: TraceHeader | None) -> TraceHeader | None:
        began, step, lost, offset = None, -1, 0, 0
        for line in iter(self._contents[index].readline, b""):
            if not line.endswith(b"\n"):
                break  # the process died while it wrote this line
            try:
                kind = msgspec.json.decode(line, type=_Line)
                if kind.event == "trace_begins":
                    header = msgspec.json.decode(line, type=TraceHeader)
                elif kind.event == "records_lost":
                    lost += msgspec.json.decode(line, type=RecordsLost).count
            except msgspec.MsgspecError as error:
                raise ConfigurationError(f"{self._files[index]} is not a scheduler trace: {error}") from error
            if kind.event == "step_snapshot":
                began, step = offset, kind.step
            elif kind.event == "step_decision" and began is not None and kind.step == step:
                size = offset + len(line) - began
                self._places.append(_Place(index, began, size, header, lost, step))
                began, lost = None, 0
            offset += len(line)
        return header


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as content:
        return mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)


def files_of(path: Path) -> list[Path]:
    """Returns the trace's files, the older one first. Raises ConfigurationError if there is no trace, or several."""
    if path.is_dir():
        found = sorted(path.glob(f"*{_END}"))
        names = sorted({file.name.removesuffix(_OLD).removesuffix(_END) for file in found})
        if not names:
            raise ConfigurationError(f"{path} has no scheduler trace: it would end in {_END}")
        if len(names) > 1:
            raise ConfigurationError(
                f"{path} has the traces of {', '.join(names)}: name one, such as {path / names[0]}{_END}"
            )
        path = path / f"{names[0]}{_END}"
    old = path.with_name(path.name.removesuffix(_END) + _OLD)
    files = [file for file in (old, path) if file.is_file()]
    if not files:
        raise ConfigurationError(f"there is no {path}: nodes write traces to the folder of scheduler.trace_folder")
    return files
