"""Handles blocks whose load failed after requests had begun to use them."""

from __future__ import annotations

from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.lifecycle import Lifecycle, failure_of
from tandem.engine.scheduling.state import SchedulerState, leave_steps
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.errors import TransferError
from tandem.wire.requests import TokenChunk


class InvalidBlocks:
    """KV that is computed from a wrong block is wrong itself. So a request is rewound to its first wrong block, the blocks that it
    computed after that count as wrong, too, and so every request that shares one of them is rewound as well."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def handle(self, block_ids: set[int]) -> list[TokenChunk]:
        state = self._state
        bad = set(block_ids)
        affected = self._affected(bad)
        self._lifecycle.begin_generation()
        updates: list[TokenChunk] = []
        # The request admitted last goes first. Each goes to the front of the line, so they end up in the old order.
        for request in reversed(state.running):
            if request.request_id in affected:
                valid = min(affected[request.request_id], request.num_computed_tokens)
                updates += self._interrupt(request, valid)
        state.running = [request for request in state.running if request.status is RequestStatus.RUNNING]
        for request in list(state.waiting.holders.values()):
            # Requests that were interrupted above are among the holders, and are rewound already.
            if affected.get(request.request_id, request.num_computed_tokens) < request.num_computed_tokens:
                updates += self._rewind_waiting(request, affected[request.request_id])
        for _, request in state.waiting.blocked.values():
            if request.request_id in affected:
                valid = affected[request.request_id]
                request.valid_load_tokens = valid
                request.num_computed_tokens = min(request.num_computed_tokens, valid)
        return updates

    def _affected(self, bad: set[int]) -> dict[str, int]:
        """Returns each affected request's first wrong token, by id. Adds to `bad` the blocks that were computed from bad ones."""
        state = self._state
        owners = list(state.owners())
        affected: dict[str, int] = {}
        before = -1
        while len(bad) != before:
            before = len(bad)
            for request in owners:
                token = state.cache.first_token_in(request, bad)
                if token is not None:
                    affected[request.request_id] = token
                    bad.update(state.cache.cached_blocks_from(request, token))
        return affected

    def _interrupt(self, request: Request, valid: int) -> list[TokenChunk]:
        state = self._state
        state.totals.loads_failed += 1
        if state.load_failure_policy is LoadFailurePolicy.FAIL:
            return [self._fail(request, valid)]
        self._lifecycle.interrupt(request, valid)
        return []

    def _rewind_waiting(self, request: Request, valid: int) -> list[TokenChunk]:
        state = self._state
        state.totals.loads_failed += 1
        if state.load_failure_policy is LoadFailurePolicy.FAIL:
            update = self._fail(request, valid)
            state.waiting.remove(request)
            return [update]
        state.cache.rewind(request, valid)
        if not request.num_computed_tokens:
            state.waiting.lost_blocks(request)
        return []

    def _fail(self, request: Request, valid: int) -> TokenChunk:
        # `end` asks the connector about its blocks; the wrong ones must not count as computed.
        leave_steps(self._state, request)
        request.num_computed_tokens = valid
        self._lifecycle.end(request, RequestStatus.FINISHED_ERROR)
        return failure_of(request, TransferError("blocks of the request's KV did not arrive whole"))
