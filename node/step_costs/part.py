"""Measures each step of the engine, from its beginning to the next one's. What a step had is what the scheduler's totals grew by.

With steps that are planned ahead, a turn of the loop books the step that the turn before has planned: its time is that step's.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

from tandem.engine.core import Engine
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.state import READ_EVERY
from tandem.node.step_costs.kept import file_of, read, write
from tandem.node.step_costs.learner import LEAST_S, StepLearner
from tandem.node.wings import PartContext, ServicePart

TELL_S = 1.0
WRITE_S = 60.0
READ_S = 0.05  # between two steps with prompts that are learnt from: learning takes some 60 µs


def make(context: PartContext) -> ServicePart | None:
    if not isinstance(context.engine, Engine):
        return None
    file = file_of(context.config, context.engine.info)
    part = StepCostsPart(context.engine.scheduler, StepLearner(read(file)))
    if file is not None:
        part.keep_in(file)
    return part


class _Work(NamedTuple):
    """What steps had, all together."""

    tokens: int
    of_prompts: int
    context: int  # see `count_read` in engine/scheduling/state.py
    pairs: int
    of_images: int

    def since(self, before: _Work) -> _Work:
        return _Work(*(now - then for now, then in zip(self, before, strict=True)))


class StepCostsPart(ServicePart):
    def __init__(self, scheduler: Scheduler, learner: StepLearner) -> None:
        self._scheduler, self._learner = scheduler, learner
        self._began: float | None = None
        self._before = self._work()
        self._planned: _Work | None = None  # the work of the step that was left open
        # Steps of `_rows` rows in a row, which only wrote. Only one in READ_EVERY knows its context.
        self._rows, self._steps, self._seconds = 0, 0, 0.0
        self._read_at = 0.0
        self._costs, self._tell_at = learner.costs(), 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def before_step(self, now: float) -> None:
        work, is_open = self._work(), self._scheduler.state.open_step is not None
        did = work.since(self._before)
        booked = self._planned
        if booked is None and not is_open:
            booked = did
        elif booked is not None and not is_open and did.tokens:
            booked = None  # the turn has booked two steps
        if self._began is not None and booked is not None and booked.tokens:
            self._took(booked, now - self._began, now)
        self._began, self._before, self._planned = now, work, did if is_open else None
        if now >= self._tell_at:
            self._tell_at = now + TELL_S
            if (costs := self._learner.costs()) != self._costs:
                self._costs = costs

    def _took(self, step: _Work, seconds: float, now: float) -> None:
        rows = step.tokens - step.of_prompts
        if step.of_images or step.of_prompts or seconds < LEAST_S or rows != self._rows:
            self._rows, self._steps, self._seconds = rows, 0, 0.0
        if step.of_images or seconds < LEAST_S:
            return  # the vision tower took most of it, or it was not measured
        if step.of_prompts:
            if now >= self._read_at:
                context, pairs = _apart(step, rows)
                self._learner.took(step.of_prompts, pairs, rows, context, seconds)
                self._read_at = now + READ_S
        else:
            self._steps, self._seconds = self._steps + 1, self._seconds + seconds
            if step.pairs:
                context = step.context // READ_EVERY
                self._learner.took(0, 0, rows, context, self._seconds / self._steps)
                self._steps, self._seconds = 0, 0.0

    def _work(self) -> _Work:
        totals, encoded = self._scheduler.state.totals, self._scheduler.encoded
        return _Work(
            totals.tokens_scheduled,
            totals.prompt_tokens_computed,
            totals.context_read,
            totals.pairs_read,
            encoded.encoded_tokens if encoded is not None else 0,
        )

    def count(self, counters: dict[str, Any]) -> None:
        costs = self._costs
        counters["step_costs"] = costs if costs.prompts_seen or costs.rows_seen else None

    # --- between two starts

    def keep_in(self, file: Path) -> None:
        def run() -> None:
            written, is_over = self._costs, False
            while not is_over:
                is_over = self._ended.wait(WRITE_S)
                if self._costs is not written:
                    written = self._costs
                    write(file, written)

        self._thread = threading.Thread(target=run, name="step-costs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(TELL_S)


def _apart(step: _Work, rows: int) -> tuple[int, int]:
    """The context that the rows of a step with prompts read, and the pairs of its prompts: exact where one prompt is read."""
    if not rows:
        return 0, step.pairs
    of_prompts = step.of_prompts
    end = (step.pairs - step.context + of_prompts * (of_prompts - 1) // 2) // max(of_prompts - 1, 1)
    context = min(max(step.context - end, 0), step.context)
    return context, max(step.pairs - context, 0)
