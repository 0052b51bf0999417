"""NIXL's own part of the connector: errors, threads, and its cost when idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kv_fake_engine import FakeEngine, consume, produce
from kv_processes import EngineProcess

from tandem.base.errors import ConfigurationError, TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.transport import NixlAgent, NixlTransport
from tandem.wire.handoff import CacheMemory
from tandem.wire.nodes import PeerAddress
from tests.kvtransfer.kv_resources import leaves_nothing_behind

pytestmark = pytest.mark.slow  # each agent takes half a second to make


@pytest.fixture
def transport() -> Iterator[NixlTransport]:
    transport = NixlTransport(NixlAgent("here", NixlOptions()))
    yield transport
    transport.close()
    transport.close()  # idempotent


def memory(blocks: int = 8) -> KVCacheMemory:
    return KVCacheMemory(torch.zeros(blocks, 2, 2, 1, 4, 8), "fake", 2, 1, 1000)


def test_the_plug_in_gets_parameters_of_its_own_and_refuses_others_by_name() -> None:
    options = NixlOptions.parse({"backend.num_workers": "2", "progress_ms": "50"})
    assert (options.parameters, options.progress_ms) == ({"num_workers": "2"}, 50)
    NixlTransport(NixlAgent("here", options)).close()
    with pytest.raises(
        ConfigurationError, match=r"transfer\.options\.backend\.workers: NIXL's UCX has no .* num_workers"
    ):
        NixlAgent("here", NixlOptions.parse({"backend.workers": "2"}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"agent_metadata": b""},
        {"agent_metadata": b"nonsense" * 40},
        {"memory_type": "TAPE"},
        {"base_address": 4096},
        {"num_blocks": 1 << 20},
    ],
)
def test_memory_that_is_not_as_described_cannot_be_connected_to(
    transport: NixlTransport, wrong: dict[str, object]
) -> None:
    transport.register(memory())
    other = NixlTransport(NixlAgent("there", NixlOptions()))
    theirs = memory()
    try:
        described = other.register(theirs)
        fields = {name: getattr(described, name) for name in CacheMemory.__struct_fields__}
        with pytest.raises(TransferError):
            transport.connect(CacheMemory(**{**fields, **wrong}))  # type: ignore[arg-type]
        # And the right description still works after that.
        transport.connect(described)
    finally:
        other.close()


def test_a_node_leaves_no_thread_and_no_socket_behind() -> None:
    config = TransferConfig()

    def round_trip() -> None:
        producer, consumer = (FakeEngine("nixl", name, epoch, config) for name, epoch in (("p", 1), ("c", 2)))
        tokens = list(range(20))
        consumer.add("r", tokens, consume("t", PeerAddress("p", 1, producer.endpoint())))
        producer.add("r", tokens, produce("t", PeerAddress("c", 2, consumer.endpoint())))
        consumer.step()
        producer.run_until("r", ["freed"])
        assert consumer.run_until("r", ["loaded"])
        producer.close()
        consumer.close()
        producer.close()  # idempotent

    leaves_nothing_behind(round_trip)


def test_an_idle_connector_costs_next_to_nothing() -> None:
    """In processes of their own: this one has threads that other tests left."""
    producer, consumer = (EngineProcess("nixl", name, epoch) for name, epoch in (("p", 1), ("c", 2)))
    try:
        tokens = list(range(20))
        consumer.call("add", "r", tokens, consume("t", producer.address))
        producer.call("add", "r", tokens, produce("t", consumer.address))
        consumer.call("step")
        producer.begin("run_until", "r", ["freed"])
        consumer.call("run_until", "r", ["loaded"])
        producer.result()
        producer.begin("idle_share")
        assert consumer.call("idle_share") < 0.02
        assert producer.result() < 0.02
    finally:
        producer.close()
        consumer.close()


class StubbornAgent(NixlAgent):
    """NIXL does not give its registration back."""

    def close(self) -> None:
        super().close()
        raise TransferError("NIXL: giving back the KV cache's registration: nixlNotFoundError")


def test_a_way_is_closed_although_its_registration_is_not_given_back() -> None:
    transport = NixlTransport(StubbornAgent("here", NixlOptions()))
    transport.register(memory())
    assert transport.reopen() is not None
    assert transport.close_earlier()
    transport.close()
