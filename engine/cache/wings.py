"""The part of the cache that can be deleted: blocks of recurrent states. It is known by its name here."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wing
from tandem.engine.cache.group_manager import GroupManager, KVCacheGroup
from tandem.engine.cache.pool import BlockPool
from tandem.engine.request import Request
from tandem.kvtransfer.base import SchedulerConnector

STATES = "tandem.engine.cache.states.joined"


class StateTables(GroupManager):
    """The block tables of a group of recurrent states, and the blocks of its checkpoints."""

    held: list[int]
    """The checkpoint blocks of all steps that are planned and not booked."""

    @abc.abstractmethod
    def take_copies(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Returns the planned step's copies, (from, to), and the checkpoint blocks among them, which the caller passes to `release`
        when the step is booked."""

    @abc.abstractmethod
    def release(self, checkpoints: Sequence[int]) -> None: ...


class StateCheckpoints(Protocol):
    """The places of all requests' checkpoints. The scheduler caps a request's tokens by `cap`, and calls `keep` once per step."""

    wanted: Callable[[Request], bool]
    """Whether a connector wants checkpoints of a request while it decodes."""

    def begin(self, request: Request, num_hit_tokens: int) -> None:
        """Chooses the places of a request that is about to get its first blocks, with a prefix hit of `num_hit_tokens`."""

    def handed_over(self, request: Request, num_tokens: int) -> None:
        """The prefill node's states after the first `num_tokens` tokens have arrived."""

    def loaded(self, request: Request, num_tokens: int) -> None:
        """A connector has loaded the states after the first `num_tokens` tokens. If these are whole blocks, the states are kept as
        a checkpoint, too."""

    def cap(self, request: Request, num_computed: int, num_new: int) -> int:
        """Limits `num_new` so that the next step ends at the request's next place."""

    def keep(
        self, requests: dict[str, Request], num_scheduled: dict[str, int], connector: SchedulerConnector | None = None
    ) -> None:
        """Makes checkpoints of scheduled requests that stand at one of their places, and tells the connector. Called when the step
        is planned, so checkpoints take only blocks that the step left free."""

    def forget(self, request_id: str) -> None: ...


class StateBlocksWing(Protocol):
    def tables(self, index: int, group: KVCacheGroup, pool: BlockPool, hash_block_size: int) -> StateTables: ...

    def checkpoints(
        self, managers: Sequence[GroupManager], states: StateTables, min_tokens: int, num_lookahead_tokens: int
    ) -> StateCheckpoints: ...


def states_wing() -> StateBlocksWing:
    if states := find_wing(STATES):
        return cast("StateBlocksWing", states)
    raise ConfigurationError(
        "a model with recurrent states is not served: this installation has no engine/cache/states"
    )
