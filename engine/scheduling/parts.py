"""What a wing's part of the scheduler can be asked: pins of agents' turns, limits of drafts, and images that a step encodes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from tandem.engine.request import Request
from tandem.engine.scheduling.output import EncoderInput, SchedulerOutput
from tandem.engine.scheduling.queue import QueuePolicy
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature


class TurnPins(Protocol):
    """Lets ended turns of agents keep their blocks for their job's next turn."""

    @property
    def policy(self) -> QueuePolicy:
        """Which requests go first, with pins."""

    @property
    def pinned(self) -> Mapping[str, Request]:
        """The ended requests that keep their blocks, by job."""

    def has(self, job_id: str | None) -> bool: ...

    def arrived(self, request: Request) -> None:
        """A request has come."""

    def keep(self, request: Request) -> bool:
        """A request has ended. Returns whether it keeps its blocks."""

    def turn_ended(self, job_id: str, request_id: str, tools: Sequence[str] | None) -> bool:
        """A router reports that the turn's answer is complete, and which tools it called. Returns whether its pin has ended."""

    def give_way(self, besides: str | None) -> bool:
        """Ends the pin that would end first, so that a request can run; the pin of the job `besides` only when there is no other.
        Returns False without pins."""

    def sweep(self) -> bool:
        """Ends the overdue pins. Returns whether pins have changed since the last call, so that the queues are put in order."""

    def next_end(self) -> float | None: ...

    @property
    def is_due(self) -> bool:
        """A pin's time is over, and it has not been ended yet."""

    def end_all(self, why: str) -> None: ...

    def close(self) -> None:
        """Ends all pins, and makes no other."""


class DraftLimits(Protocol):
    """Says how long a draft each request may get."""

    def limits(self, step: SchedulerOutput, requests: Iterable[Request]) -> dict[str, int]:
        """By request, after this step. Requests without an entry get none."""

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None: ...

    def took(self, step: SchedulerOutput, seconds: float) -> None:
        """Notes a step's time. Call it before the step's drafts are settled."""

    def searched(
        self,
        limits: Mapping[str, int],
        found: Container[str],
        requests: Mapping[str, Request],
        seconds: float,
        guess_s: float = 0.0,
    ) -> None:
        """Notes a search for drafts: it took `seconds`, and each token takes a draft model `guess_s`."""


class EncodedImages(Protocol):
    """The scheduler's account of the runner's rows of images. It never holds more than `capacity` tokens."""

    capacity: int
    tokens_per_step: int
    encoded_tokens: int
    reused_tokens: int
    received_tokens: int

    def __len__(self) -> int: ...

    def expect(self, request_id: str, parts: Iterable[MediaFeature]) -> list[MediaFeature]:
        """The request will wait for rows of these parts, except those that are here. Returns the parts to ask an encoder node for.
        At most `capacity` tokens may be on their way; further parts are encoded here instead."""

    def came(self, identifier: str, rows: PromptEmbeds) -> None: ...
    def will_not_come(self, identifier: str) -> None: ...

    def awaits(self, request: Request, at: int) -> bool:
        """Whether the request's token `at` needs rows that are on their way, or that are dropped before they are made again."""

    def forget(self, request_id: str) -> None:
        """A request has ended: drops the expected rows that no other request wants."""

    def begin_step(self, most: float) -> None:
        """Begins planning a step that may encode at most `most` tokens."""

    def cap(self, request: Request, start: int, num_new: int) -> int:
        """How many of the `num_new` tokens from `start` on can be computed: up to the first part that the step or the cache has no
        room for, whose rows are on their way, or whose rows others hold that are to be dropped."""

    def take(self, request: Request, start: int, num_new: int) -> None:
        """The request begins to hold the parts that these tokens need. `cap` has allowed the tokens."""

    def passed(self, request: Request) -> None:
        """The request's computed tokens have advanced. It keeps holding only a part that they end in the middle of. A part that
        comes again later is released, too, because it would take room from the parts in between."""

    def release(self, request_id: str) -> None:
        """The request has stopped running: it releases all its parts."""

    def drop(self, identifiers: Iterable[str]) -> None:
        """The runner has no rows of these parts, because they could not be made: the next request that needs one has it encoded
        again. A part that requests still hold is dropped when they have ended."""

    def drop_all(self) -> None:
        """The same for all parts."""

    def take_step(self) -> tuple[list[EncoderInput], list[str]]:
        """Returns the parts that the runner adds in this step, and those that it drops before."""

    def check_integrity(self, running: Mapping[str, Request]) -> None:
        """Raises an InternalError when the cache's data contradict each other. Only requests in `running` may hold parts."""
