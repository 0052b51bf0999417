"""The half that plans: turns what happens to requests into commands, and puts them into the step's metadata."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from tandem.kvtransfer.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorOutput,
    ScheduledStep,
    SchedulerConnector,
    TransferRequest,
)
from tandem.kvtransfer.protocol.commands import (
    AbandonSend,
    AnnounceSend,
    BeginReceive,
    BlockTable,
    CancelReceive,
    Command,
    ComputesAt,
    DeclineTransfer,
    ExtendSend,
    FinishSend,
    PlanSend,
    StepCommands,
)
from tandem.kvtransfer.protocol.statistics import ComputeRate
from tandem.wire.requests import KVTransferParams, TransferRole


@dataclasses.dataclass(slots=True)
class _Entry:
    """A request that takes part in a transfer."""

    transfer: KVTransferParams
    num_tokens: int  # when it was added: its prompt, and what it wrote before it moved here
    token_hash: bytes
    local_tokens: int = 0  # consumer: found in the prefix cache when it was last admitted
    begun: bool = False  # the worker half knows blocks of it
    done: bool = False  # consumer: the transfer has ended, one way or the other
    computed: int = 0  # producer: tokens whose KV is in its blocks after the steps planned so far
    overran: bool = (
        False  # producer: a step went on after the tokens that are sent, and took the states along
    )


def token_hash(token_ids: Sequence[int], cache_salt: str | None, lora: str | None) -> bytes:
    """What both nodes must agree on before one's KV becomes the other's: the same tokens under the same model.

    Over all tokens, independent of block size, so that nodes with different blocks can compare.
    """
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes())
    for part in (cache_salt, lora):
        encoded = b"" if part is None else part.encode()
        digest.update(b"\0" if part is None else b"\1")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def _copied(block_ids: BlockIds) -> BlockTable:
    return [list(ids) for ids in block_ids]


class SchedulerHalf(SchedulerConnector):
    def __init__(self, block_size: int, state_blocks: int = 0) -> None:
        """`state_blocks`: see KVCacheMemory."""
        self._block_size = block_size
        self._state_blocks = state_blocks
        self._entries: dict[str, _Entry] = {}
        self._commands: list[Command] = []
        self._rate = ComputeRate()
        self._told_rate = 0.0
        self._planned_now: set[str] = set()  # their whole block table is in this step's commands

    def on_new_request(self, request: TransferRequest) -> None:
        if request.transfer is not None:
            self._entries[request.request_id] = _Entry(
                transfer=request.transfer,
                num_tokens=request.num_tokens,
                token_hash=token_hash(request.all_token_ids, request.cache_salt, request.lora),
            )
            if request.transfer.role is TransferRole.PRODUCE:
                self._commands.append(AnnounceSend(request.request_id, request.transfer.transfer_id))

    def get_num_new_matched_tokens(
        self, request: TransferRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        entry = self._entries.get(request.request_id)
        if entry is None:
            return 0, False
        if entry.transfer.role is TransferRole.PRODUCE:
            return 0, False
        if entry.begun or num_computed_tokens >= entry.num_tokens:
            return 0, False
        entry.local_tokens = num_computed_tokens
        return entry.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        if entry.transfer.role is TransferRole.PRODUCE:
            self._plan_send(request, entry, block_ids)
        elif num_external_tokens > 0 and not entry.begun:
            self._begin_receive(request.request_id, entry, block_ids)

    def _plan_send(self, request: TransferRequest, entry: _Entry, block_ids: BlockIds) -> None:
        request_id = request.request_id
        entry.begun = True
        # Blocks found in the prefix cache may be under computation in this very step, by the request that
        # they were cached for: nothing counts as computed before the step is over.
        # That holds for what another connector has loaded, too.
        entry.computed = request.num_computed_tokens
        self._planned_now.add(request_id)
        self._commands.append(
            PlanSend(
                request_id,
                entry.transfer.transfer_id,
                entry.transfer.peer,
                entry.num_tokens,
                entry.token_hash,
                _copied(block_ids),
            )
        )

    def _begin_receive(self, request_id: str, entry: _Entry, block_ids: BlockIds) -> None:
        entry.begun = True
        first = entry.local_tokens // self._block_size
        total = -(-entry.num_tokens // self._block_size)
        firsts = [first for _ in block_ids]
        tables = [list(ids[first:total]) for ids in block_ids]
        if self._state_blocks:
            firsts[-1], tables[-1] = 0, list(block_ids[-1])
        self._commands.append(
            BeginReceive(
                request_id,
                entry.transfer.transfer_id,
                entry.transfer.peer,
                entry.num_tokens,
                entry.local_tokens,
                entry.token_hash,
                firsts,
                tables,
            )
        )

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        plan = StepCommands(
            preempted=[request_id for request_id in step.preempted_req_ids if self._is_sending(request_id)],
            before_forward=self._commands,
        )
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            entry = self._entries.get(request_id)
            if entry is None or not self._is_sending(request_id):
                continue
            if entry.computed >= entry.num_tokens:
                entry.overran = True
                continue
            if request_id not in self._planned_now:
                new = step.new_block_ids(request_id)
                if any(new):
                    plan.before_forward.append(ExtendSend(request_id, _copied(new)))
            entry.computed += num_tokens
            plan.computed[request_id] = entry.computed
            plan.num_tokens += num_tokens
        self._commands = []
        self._planned_now = set()
        self._tell_rate(plan)
        return plan

    def step_took(self, num_prompt_tokens: int, seconds: float) -> None:
        self._rate.took(num_prompt_tokens, seconds)

    def _tell_rate(self, plan: StepCommands) -> None:
        """If it is news: no step is made for it alone."""
        rate = self._rate.tokens_per_s
        if rate is not None and not 0.9 < self._told_rate / rate < 1.1:
            self._told_rate = rate
            plan.before_forward.append(ComputesAt(rate))

    def _is_sending(self, request_id: str) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.begun and entry.transfer.role is TransferRole.PRODUCE

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for request_id in (*output.finished_recving, *output.failed_recving):
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.done = True

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return False
        if entry.transfer.role is TransferRole.PRODUCE:
            return self._finish_send(request, entry, block_ids)
        if not entry.begun:
            self._commands.append(DeclineTransfer(entry.transfer.transfer_id, entry.transfer.peer))
            return False
        if entry.done:
            return False
        self._commands.append(CancelReceive(request.request_id))
        return True

    def _finish_send(self, request: TransferRequest, entry: _Entry, block_ids: BlockIds) -> bool:
        has_first_token = entry.begun and request.num_tokens > entry.num_tokens
        # Keys and values of the prompt stay what they are. States do not: those of a later token are not handed over.
        is_stale = self._state_blocks > 0 and (
            entry.overran or request.num_computed_tokens != entry.num_tokens
        )
        if has_first_token and not is_stale:
            first_token = request.all_token_ids[entry.num_tokens]
            self._commands.append(FinishSend(request.request_id, first_token, _copied(block_ids)))
            return True
        self._commands.append(AbandonSend(request.request_id, entry.transfer.transfer_id, kept=entry.begun))
        return entry.begun

    def has_pending_work(self) -> bool:
        return bool(self._commands)
