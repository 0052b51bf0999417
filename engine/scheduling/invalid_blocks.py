"""Undoes what requests computed from wrong KV: from blocks whose load failed after requests had begun to use them, and from an
input that failed."""

from __future__ import annotations

from tandem.base.errors import KVLoadFailed
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.lifecycle import Lifecycle, failure_of
from tandem.engine.scheduling.state import SchedulerState, leave_steps
from tandem.kvtransfer.config import LoadFailurePolicy
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
        state.totals.loads_failed += len(affected.keys() - state.waiting.blocked.keys())
        return self._undo(affected, state.load_failure_policy)

    def forget_input(self, request: Request, first: int) -> set[str]:
        """The request fails because of its own input, which token `first` is the first to read. Everything that names this input
        is forgotten, here and in the connector, and nothing else. Every other request that has such KV is rewound, because it
        may have found it in the cache; returns their ids. They compute it again, and fail or not on their own.

        A block's hash contains the hashes before it. So a request that shares a block, or has computed something from a shared
        one, has the same hash at the input's first block."""
        state = self._state
        place = first // state.cache.hash_block_size
        affected: dict[str, int] = {}
        state.cache.forget_names(request, first)
        self._tell_connector(request, first)
        if place < len(request.block_hashes):
            name = request.block_hashes[place]
            for other in (*state.owners(), *state.held.values()):
                hashes = other.block_hashes
                if other is request or place >= len(hashes) or hashes[place] != name:
                    continue
                if other.num_computed_tokens <= first:
                    continue
                state.cache.forget_names(other, first)
                self._tell_connector(other, first)
                if not other.is_finished:
                    other.makes_up_load = True
                    affected[other.request_id] = first
        self._undo(affected, LoadFailurePolicy.RECOMPUTE)
        return set(affected)

    def _tell_connector(self, request: Request, valid: int) -> None:
        if self._state.connector is not None:
            self._state.connector.forget_after(request, valid)

    def _undo(self, affected: dict[str, int], policy: LoadFailurePolicy) -> list[TokenChunk]:
        """Rewinds these requests to their first wrong token, or ends them if that is the policy."""
        state = self._state
        updates: list[TokenChunk] = []
        # The request admitted last goes first. Each goes to the front of the line, so they end up in the old order.
        for request in reversed([*state.running, *state.idle_work.resting]):
            if request.request_id in affected:
                valid = min(affected[request.request_id], request.num_computed_tokens)
                updates += self._interrupt(request, valid, policy)
        state.running = [request for request in state.running if request.status is RequestStatus.RUNNING]
        state.idle_work.drop_ended()
        for request in list(state.waiting.holders.values()):
            # Requests that were interrupted above are among the holders, and are rewound already.
            if affected.get(request.request_id, request.num_computed_tokens) < request.num_computed_tokens:
                updates += self._rewind_waiting(request, affected[request.request_id], policy)
        for _, request in state.waiting.blocked.values():
            if request.request_id in affected:
                valid = affected[request.request_id]
                if request.valid_load_tokens is not None:  # its load waits since an earlier finding
                    valid = min(valid, request.valid_load_tokens)
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

    def _interrupt(self, request: Request, valid: int, policy: LoadFailurePolicy) -> list[TokenChunk]:
        if policy is LoadFailurePolicy.FAIL:
            return [self._fail(request, valid)]
        self._lifecycle.interrupt(request, valid)
        return []

    def _rewind_waiting(self, request: Request, valid: int, policy: LoadFailurePolicy) -> list[TokenChunk]:
        state = self._state
        if policy is LoadFailurePolicy.FAIL:
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
        return failure_of(request, KVLoadFailed("blocks of the request's KV did not arrive whole"))
