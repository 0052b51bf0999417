"""Simulates the transfers of KV between nodes. The KV of one chunk travels while the next chunk is computed, and each node sends and
receives one piece at a time, at the rate that the costs give."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from tandem.kvtransfer.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    LoadFailure,
    ScheduledStep,
    SchedulerConnector,
    TransferRequest,
)
from tandem.simulator.costs import CostModel
from tandem.wire.requests import KVTransferParams, TransferRole


class Port:
    """A node's end of the network. It collects the results of the node's transfers until the node takes them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.output = ConnectorOutput()
        self.sends_until = 0.0
        self.receives_until = 0.0
        self.under_way = 0

    def take(self) -> ConnectorOutput | None:
        """The results since the last call; None if there are none."""
        output = self.output
        if output.is_empty:
            return None
        self.output = ConnectorOutput()
        return output


@dataclasses.dataclass(slots=True)
class SimulatedTransfer:
    producer: Port | None = None
    consumer: Port | None = None
    producer_id: str = ""  # the request's id on the producer
    consumer_id: str = ""  # the request's id on the consumer
    num_tokens: int = 0
    sent: int = 0
    computed: int = 0
    first_token: int | None = None
    arrived_at: float = 0.0  # when the last piece sent so far arrives


class Network:
    def __init__(self, loop: asyncio.AbstractEventLoop, costs: CostModel) -> None:
        self._loop = loop
        self._costs = costs
        self._transfers: dict[str, SimulatedTransfer] = {}
        self.bytes_moved = 0.0

    def register(self, name: str, port: Port, request_id: str, num_tokens: int, wanted_from: int) -> None:
        """The consumer has allocated blocks for the transfer `name`, and has the tokens before `wanted_from` in its own cache."""
        transfer = self._transfers.setdefault(name, SimulatedTransfer())
        transfer.consumer, transfer.consumer_id = port, request_id
        transfer.num_tokens = num_tokens
        transfer.sent = max(transfer.sent, wanted_from)
        port.under_way += 1
        self._go_on(name, transfer)

    def computed(self, name: str, port: Port, request_id: str, num_tokens: int, first_token: int | None) -> None:
        """The producer has computed the first `num_tokens` tokens. `first_token` is the answer's first token once the prompt is complete."""
        transfer = self._transfers.setdefault(name, SimulatedTransfer())
        if transfer.producer is None:
            transfer.producer, transfer.producer_id = port, request_id
            port.under_way += 1
        transfer.computed, transfer.first_token = num_tokens, first_token
        self._go_on(name, transfer)

    def _go_on(self, name: str, transfer: SimulatedTransfer) -> None:
        producer, consumer = transfer.producer, transfer.consumer
        if producer is None or consumer is None:
            return
        now = self._loop.time()
        tokens = min(transfer.computed, transfer.num_tokens) - transfer.sent
        if tokens > 0:
            begin = max(now, producer.sends_until, consumer.receives_until)
            end = begin + self._costs.transfer_s(tokens)
            producer.sends_until = consumer.receives_until = transfer.arrived_at = end
            self.bytes_moved += tokens * self._costs.kv_bytes_per_token
            transfer.sent += tokens
        if transfer.first_token is not None:
            at = max(now, transfer.arrived_at) + self._costs.transfer.handover_s
            self._loop.call_at(at, self._arrive, name)

    def _arrive(self, name: str) -> None:
        transfer = self._transfers.pop(name, None)
        if transfer is None or transfer.producer is None or transfer.consumer is None:
            return
        transfer.producer.under_way -= 1
        transfer.consumer.under_way -= 1
        transfer.consumer.output.finished_recving[transfer.consumer_id] = Handoff(
            transfer.first_token, transfer.num_tokens
        )
        transfer.producer.output.finished_sending.add(transfer.producer_id)
        transfer.consumer.wake()
        transfer.producer.wake()

    def cancel(self, name: str) -> None:
        """Ends a transfer because one side's request has ended before it; both sides stop waiting."""
        transfer = self._transfers.pop(name, None)
        if transfer is None:
            return
        if transfer.consumer is not None:
            transfer.consumer.under_way -= 1
            transfer.consumer.output.failed_recving[transfer.consumer_id] = LoadFailure("it was cancelled")
            transfer.consumer.wake()
        if transfer.producer is not None:
            transfer.producer.under_way -= 1
            transfer.producer.output.finished_sending.add(transfer.producer_id)
            transfer.producer.wake()


class SimulatedConnector(SchedulerConnector):
    """The scheduler half of a connector for the simulated network. It has no worker half, because no bytes are moved."""

    def __init__(self, network: Network, port: Port) -> None:
        self._network = network
        self._port = port
        self._loading: dict[str, KVTransferParams] = {}
        self._loaded: set[str] = set()
        self._sending: dict[str, KVTransferParams] = {}

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        transfer = request.transfer
        if transfer is None or transfer.role is not TransferRole.CONSUME or request.request_id in self._loaded:
            return 0, False
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        transfer = request.transfer
        if transfer is None:
            return
        if transfer.role is TransferRole.PRODUCE:
            self._sending[request.request_id] = transfer
        elif num_external_tokens:
            self._loading[request.request_id] = transfer
            self._loaded.add(request.request_id)
            found = request.num_tokens - num_external_tokens
            self._network.register(transfer.transfer_id, self._port, request.request_id, request.num_tokens, found)

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        return ConnectorMetadata()

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for request_id in (*output.finished_recving, *output.failed_recving):
            self._loading.pop(request_id, None)

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        request_id = request.request_id
        self._loaded.discard(request_id)
        if (loading := self._loading.get(request_id)) is not None:
            self._network.cancel(loading.transfer_id)
            return True
        sending = self._sending.pop(request_id, None)
        if sending is None:
            return False
        if not request.output_token_ids:  # it was aborted
            self._network.computed(sending.transfer_id, self._port, request_id, 0, None)
            self._network.cancel(sending.transfer_id)
        return True

    def sending(self, request_id: str) -> str | None:
        """The id of the transfer that sends this request's KV, or None."""
        transfer = self._sending.get(request_id)
        return transfer.transfer_id if transfer is not None else None
