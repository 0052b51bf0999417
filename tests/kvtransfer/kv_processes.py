"""Runs fake engines in their own processes; the test drives them call by call."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from kv_connectors import NAMES

from tandem.kvtransfer.config import TransferConfig
from tandem.wire.endpoints import key_of
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams
from tandem.wire.sockets import admit

CALL_TIMEOUT_S = 60.0

# Each process is forked from a server that has imported what takes seconds to import and has used none of it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "nixl._bindings", *(f"tandem.kvtransfer.{name}" for name in NAMES)])


def _serve(calls: Connection, connector: str, node_id: str, epoch: int, config: dict[str, Any]) -> None:
    import torch
    from kv_fake_engine import BLOCK_SIZE, FakeEngine
    from kv_pulse import Pulse

    pulse = Pulse()

    torch.set_num_threads(1)
    dtype = getattr(torch, config.pop("dtype", "float32"))
    num_blocks = config.pop("num_blocks", 64)
    block_size = config.pop("block_size", BLOCK_SIZE)
    tokens_before_heads = config.pop("tokens_before_heads", False)
    layer_s = config.pop("layer_s", 0.0)
    ranks = config.pop("ranks", 1)  # processes of their own, but for the first
    cuts = config.pop("cuts", ())  # into stages
    kind: Any = FakeEngine
    if ranks > 1:
        from kv_wide_engine import WideFakeEngine

        kind = functools.partial(WideFakeEngine, ranks=ranks, cuts=cuts, processes=True)
    engine: FakeEngine = kind(
        connector,
        node_id,
        epoch,
        TransferConfig(connector=connector, **config),
        num_blocks,
        dtype,
        block_size,
        tokens_before_heads,
    )
    engine.layer_s = layer_s
    calls.send(engine.endpoint())
    peers: set[str] = set()
    while True:
        try:
            name, args, kwargs = calls.recv()
        except EOFError:
            name, args, kwargs = "close", (), {}
        transfers = [one for one in (*args, *kwargs.values()) if isinstance(one, KVTransferParams)]
        peers.update(key_of(transfer.peer.endpoint) for transfer in transfers)
        admit(peers)
        try:
            asked = pulse if name == "lost_s" else engine
            result, error = getattr(asked, name)(*args, **kwargs), None
        except BaseException:
            result, error = None, traceback.format_exc()
        calls.send((result, error))
        if name == "close":
            return


class EngineProcess:
    """A proxy: `engine.step()` steps the engine in its process. A call that takes too long fails the test."""

    def __init__(self, connector: str, node_id: str, epoch: int, **config: Any) -> None:
        self._calls, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, connector, node_id, epoch, config), daemon=True)
        self._process.start()
        theirs.close()
        self._node_id, self._epoch = node_id, epoch
        self._endpoint: str | None = None

    @property
    def address(self) -> PeerAddress:
        if self._endpoint is None:
            self._endpoint = self._receive()
        return PeerAddress(self._node_id, self._epoch, self._endpoint)

    def _receive(self) -> Any:
        if not self._calls.poll(CALL_TIMEOUT_S):
            raise TimeoutError(f"{self._node_id} did not answer")
        return self._calls.recv()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.begin(name, *args, **kwargs)
        return self.result()

    def begin(self, name: str, *args: Any, **kwargs: Any) -> None:
        assert self.address
        self._calls.send((name, args, kwargs))

    def result(self) -> Any:
        result, error = self._receive()
        if error is not None:
            raise AssertionError(f"{self._node_id}: {error}")
        return result

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(60)

    def pause(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        if self._process.is_alive():
            self.call("close")
            self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"{self._node_id} did not end")
