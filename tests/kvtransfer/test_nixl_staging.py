"""KV on a device that is staged in host memory: what is copied, when, and what is refused. tests/engine/model/test_device_faults.py runs
whole engines over it, with every fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import ConnectorContext, KVCacheMemory
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.nixl import create
from tandem.kvtransfer.nixl.staging import StagedTransport
from tandem.kvtransfer.protocol.transport import HandleId, Move, Operation, RemoteId, Transport, runs_of
from tandem.wire.handoff import CacheMemory
from tests.engine.model.fake_device import CUDA, FakeDevice, memory

BLOCKS, SHAPE = 6, (2, 2, 1, 4, 8)


class NotedTransport(Transport):
    """Records the memory that peers would read."""

    name = "noted"

    def __init__(self) -> None:
        self.memory: KVCacheMemory | None = None
        self.posted: list[torch.Tensor] = []

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        self.memory = memory
        return CacheMemory(b"", "DRAM", 0, memory.tensor.data_ptr(), memory.num_blocks, memory.block_bytes)

    def connect(self, memory: CacheMemory) -> RemoteId:
        return RemoteId(0)

    def disconnect(self, remote: RemoteId) -> None: ...

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        assert self.memory is not None
        whole = self.memory.tensor.view(-1).view(torch.uint8).view(-1, move.unit_bytes)
        self.posted.append(whole[torch.from_numpy(move.local)].clone())
        return HandleId(1)

    def is_done(self, handle: HandleId) -> bool:
        return True

    def close(self) -> None: ...


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    with device.present(), torch.inference_mode():
        yield device


def staged(dtype: torch.dtype = torch.float32) -> tuple[StagedTransport, NotedTransport, torch.Tensor]:
    cache = torch.zeros(BLOCKS, *SHAPE, dtype=dtype, device=CUDA)
    inner = NotedTransport()
    transport = StagedTransport(inner)
    reachable = transport.register(KVCacheMemory(cache, "m", 2, 1, 100))
    assert reachable.memory_type == "DRAM"
    assert inner.memory is not None
    inner.memory.tensor.zero_()
    torch.cuda.synchronize()  # the cache is there before anything moves
    return transport, inner, cache


def write(units: Sequence[int], unit_bytes: int) -> Move:
    where = np.array(units, np.int64)
    return Move(Operation.WRITE, "t", unit_bytes, where, where)


@pytest.mark.parametrize("parts", [1, 2], ids=["blocks", "a layer of each"])
def test_what_is_posted_is_what_the_device_has_computed(device: FakeDevice, parts: int) -> None:
    transport, inner, cache = staged()
    numbers = torch.arange(cache.numel(), dtype=torch.float32).view(cache.shape)
    cache.copy_(numbers)
    device.synchronize()  # the connector posts after an event
    assert inner.memory is not None
    size = inner.memory.block_bytes // parts
    transport.post(RemoteId(0), write([parts * 1, parts * 2, parts * 5], size))
    right = numbers.view(-1).view(torch.uint8).view(-1, size)[[parts * 1, parts * 2, parts * 5]]
    assert torch.equal(inner.posted[0], right)
    assert not inner.memory.tensor[3].any()  # nothing else was copied


def test_what_has_landed_is_in_the_cache_at_once(device: FakeDevice) -> None:
    transport, inner, cache = staged(torch.bfloat16)
    assert inner.memory is not None
    inner.memory.tensor[2].fill_(7.0)
    inner.memory.tensor[4].fill_(8.0)
    inner.memory.tensor[5].fill_(9.0)  # not said to have landed
    transport.landed([4, 2, 4])
    assert memory(cache).float().amax(dim=(1, 2, 3, 4, 5)).tolist() == [0, 0, 7, 0, 8, 0]


@given(st.lists(st.integers(0, 60), unique=True, min_size=1))
def test_runs_are_the_units_in_order(units: list[int]) -> None:
    runs = list(runs_of(np.array(units)))
    assert [first + index for first, count in runs for index in range(count)] == units


def test_memory_that_cannot_be_page_locked_is_an_error_that_says_how_much(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=None)
    )
    with pytest.raises(ConfigurationError, match=r"staging is host, and 0\.0 GiB .*--kv-memory"):
        staged()


def test_a_cache_in_host_memory_is_left_alone() -> None:
    inner = NotedTransport()
    transport = StagedTransport(inner)
    cache = torch.zeros(BLOCKS, *SHAPE)
    transport.register(KVCacheMemory(cache, "m", 2, 1, 100))
    assert inner.memory is not None
    assert inner.memory.tensor is cache
    transport.post(RemoteId(0), write([1], inner.memory.block_bytes))
    transport.landed([1])
    transport.close()


def test_pull_is_refused() -> None:
    config = TransferConfig(connector="nixl", direction="pull", options={"staging": "host"})
    with pytest.raises(ConfigurationError, match=r"staging: host needs transfer\.direction: push"):
        create(ConnectorContext("n", 1, "127.0.0.1", 16, config, lambda: None))
