"""The runner's part for adapters: tells each batch which slot each row's adapter is in."""

from __future__ import annotations

import dataclasses

import numpy as np

from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice
from tandem.engine.model.lora.slots import AdapterSlots
from tandem.engine.model.parts import AskedRequest, RunnerPart
from tandem.engine.model.runner import Batch
from tandem.engine.model.staging import to_device


class AdaptedRequests(RunnerPart):
    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._wanted: dict[int, str] = {}  # the identity of each request's adapter, by row

    def add(self, row: int, asked: AskedRequest, requests: RequestRows) -> None:
        if asked.facts.lora is not None:
            self._wanted[row] = asked.facts.lora

    def clear(self, row: int) -> None:
        self._wanted.pop(row, None)

    def prepare(
        self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice
    ) -> Batch:
        if not self._wanted:
            return batch
        rows = scheduled.rows.tolist()
        wanted = {self._wanted[row] for row in rows if row in self._wanted}
        if not wanted:
            return batch
        slots = self._slots.place(wanted)
        of_request = np.array(
            [slots[self._wanted[row]] if row in self._wanted else -1 for row in rows], np.int64
        )
        of_token = np.repeat(of_request, np.diff(scheduled.query_start))
        return dataclasses.replace(
            batch,
            adapter_slots=to_device(of_token, batch.token_ids.device),
            adapter_slots_used=max(slots.values()) + 1,
        )
