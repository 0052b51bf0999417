"""The record of a controller's exchange, with Ray's store in this process's memory."""

from __future__ import annotations

import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ExchangePhase
from tandem.cluster.on_ray.runtime import import_ray
from tests.cluster.on_ray.test_neighbours import MemoryKv

ray = import_ray()

from tandem.cluster.on_ray import state_store  # noqa: E402
from tandem.cluster.on_ray.exchange import begin_exchange, exchange_of, is_being_exchanged  # noqa: E402


class Actors:
    """Ray's actors, of which none can be made at first."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.can_make = False

    def remote(self, **_: object) -> object:
        return lambda kind: self

    def options(self, *, name: str, **_: object) -> Making:
        return Making(self, name)

    def get(self, name: str, namespace: str) -> object:
        if name not in self.names:
            raise ValueError(name)
        return object()


class Making:
    def __init__(self, actors: Actors, name: str) -> None:
        self._actors, self._name = actors, name

    def remote(self, *_: object) -> None:
        if not self._actors.can_make:
            raise ray.exceptions.RpcError("the control store does not answer", rpc_code=14)
        self._actors.names.append(self._name)


async def test_an_exchange_that_no_process_carries_out_does_not_keep_others_from_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv, actors = MemoryKv(), Actors()
    monkeypatch.setattr(state_store, "internal_kv", lambda: kv)
    monkeypatch.setattr(ray, "remote", actors.remote)
    monkeypatch.setattr(ray, "get_actor", actors.get)
    config = TandemConfig()
    with pytest.raises(Unavailable, match="does not answer"):
        await begin_exchange("chat", config, config, b"", lambda parts, name: None)
    exchange = await exchange_of("chat")
    assert (exchange.view.is_over, exchange.phase) == (True, ExchangePhase.FAILED)
    actors.can_make = True
    begun = await begin_exchange("chat", config, config, b"", lambda parts, name: None)
    assert await is_being_exchanged("chat")
    with pytest.raises(Unavailable, match="is being replaced"):
        await begin_exchange("chat", config, config, b"", lambda parts, name: None)
    exchange = await exchange_of("chat")
    assert (exchange.id, exchange.phase) == (begun, ExchangePhase.CHECKING)
