"""A process that an earlier controller started, and that cannot be reached at first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tandem.cluster.on_ray.runtime import import_ray
from tandem.wire.nodes import RouterInfo

ray = import_ray()  # its environment is set first, or other tests of this run could not set it

from ray.exceptions import ActorUnavailableError  # noqa: E402

from tandem.cluster.on_ray import handles  # noqa: E402
from tandem.cluster.on_ray.handles import RayRouter  # noqa: E402


class FarActor:
    """Answers from the third call on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _remote(self, name: str, result: Any) -> Callable[..., Any]:
        async def call() -> Any:
            self.calls.append(name)
            if self.calls.count(name) < 3:
                raise ActorUnavailableError("the connection was reset", b"a" * 16)
            return result

        return lambda *_: call()

    def __getattr__(self, name: str) -> Any:
        info = msgspec.msgpack.encode(RouterInfo("http://host:8000", "inbox", "door", "desk"))
        result = {"configuration": b"as it is wanted", "start": info}.get(name)
        return type("Method", (), {"remote": staticmethod(self._remote(name, result))})


def test_a_process_that_cannot_be_reached_is_asked_again_and_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending it for that would end all that serves on a machine when the controller restarts while the network to it is broken."""
    actor, killed = FarActor(), []
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))
    monkeypatch.setattr(handles, "_REACH_AGAIN_S", 0.0)

    async def adopt() -> None:
        def create() -> Any:
            raise AssertionError("another one is started")

        router = RayRouter("router", "tandem", lambda running: running == b"as it is wanted", create, 1.0)
        info = await router.start(lambda what, share: None)
        assert info.url == "http://host:8000"
        assert router.is_adopted

    asyncio.run(adopt())
    assert not killed
    assert actor.calls.count("configuration") == actor.calls.count("start") == 3
