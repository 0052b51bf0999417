"""What a node needs of an engine, whichever it is. `core.Engine` is Tandem's own; `wings.py` knows others.

A node makes one engine, adds requests to it, and calls `step` again and again from one thread, the step thread. Only that thread
calls an engine, but for the methods that say otherwise. An exception out of `step` leaves the engine's state unknown: the node
fails, and never calls it again but for `shutdown`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tandem.base.errors import TandemError
from tandem.engine.model.runner import ModelInfo
from tandem.engine.request import Request
from tandem.engine.scheduling.state import SchedulerStats
from tandem.kvtransfer.base import TransferStats
from tandem.wire.kv_events import KVEvent
from tandem.wire.requests import TokenChunk
from tandem.wire.tracing import TransferTrace

if TYPE_CHECKING:
    from tandem.engine.model.adapter_book import AdapterBook
    from tandem.engine.tracing import Tracer


@dataclasses.dataclass(slots=True)
class StepResult:
    """What one call of `step` has done. `updates` go to the routers in order."""

    updates: list[TokenChunk]
    # False when the step changed nothing. Another step would change nothing either, until something arrives from outside.
    progressed: bool
    # The step changed nothing, but another one is due: a connector asked to be polled again, or its scheduler half has
    # something to send to its worker half.
    ask_again: bool = False


class NodeEngine(Protocol):
    # None while no request is traced. Set between steps.
    tracer: Tracer | None

    # --- what it serves

    @property
    def info(self) -> ModelInfo: ...

    @property
    def adapters(self) -> AdapterBook[Any] | None:
        """The LoRA adapters that requests may name; None when none are served."""

    @property
    def follows_grammars(self) -> bool: ...

    @property
    def states_wait(self) -> bool:
        """So many hidden states wait to be written that no further request may ask for them."""

    # --- requests

    def add_request(self, request: Request) -> None:
        """Queues a request; a check gives its blocks back first. Raises a RequestError for a request that can never run here."""

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests whatever their phase, without a chunk. Ids that are not here, or not any more, are no error."""

    def fail_request(self, request_id: str, error: TandemError) -> None:
        """Ends a request that cannot go on, without a chunk."""

    def step(self) -> StepResult:
        """Plans and starts one step. Books the step before it, this step, or both."""

    def seconds_until_due(self) -> float | None:
        """Seconds until a step has something to do even if nothing arrives; None: never."""

    def turn_ended(self, job_id: str, request_id: str, called: list[str] | None) -> None:
        """The answer of an agent's turn is complete, and called these tools."""

    # --- idle time

    def use_idle_time(self) -> bool:
        """Computes a part of a check. Returns False when there is none or the engine is not idle."""

    @property
    def lora_in_check(self) -> str | None:
        """The adapter that the running check computes with."""

    def wind_down(self) -> None:
        """The node drains: gives back the blocks that are kept for what may come, and keeps none from now on."""

    # --- its cache

    @property
    def caches_prefixes(self) -> bool: ...

    def tell_cache_events(self) -> None:
        """Records KV events from now on, for `take_cache_events`. Called before the first request."""

    def take_cache_events(self) -> Sequence[KVEvent]: ...

    def reset_prefix_cache(self) -> None:
        """No later request finds what is cached now, here and where peers have copied from it."""

    @property
    def has_forgotten(self) -> bool:
        """Whether nothing from before `reset_prefix_cache` would be found again if the process ended now."""

    # --- where other nodes reach it; "" where they need not

    @property
    def peer_endpoint(self) -> str: ...

    @property
    def tier_endpoint(self) -> str: ...

    # --- what it reports

    def stats(self) -> SchedulerStats: ...

    def transfer_stats(self) -> TransferStats:
        """Called from any thread."""

    def trace_of(self, request_id: str) -> TransferTrace | None:
        """The trace of a request's transfer; None before the transfer has ended, or without one."""

    def holds_blocks_of(self, request_id: str) -> bool:
        """Whether the request has ended while a transfer still needs its blocks."""

    def shutdown(self) -> None:
        """Called once, when no step runs any more, from another thread."""
