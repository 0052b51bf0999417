"""Which running process a controller that comes back adopts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from tandem.cluster.on_ray.runtime import import_ray
from tandem.engine.config import CacheConfig, EngineConfig
from tandem.kvtransfer.base import TransferConfig
from tandem.node.config import NodeConfig
from tandem.wire.nodes import Role

NODE = NodeConfig(
    node_id="prefill-0", role=Role.PREFILL, host="10.0.0.2", transfer=TransferConfig(), cores=[0, 1]
)
replace = msgspec.structs.replace


@pytest.mark.slow
def test_a_broken_connection_is_no_end_and_the_word_of_a_death_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: imports Ray. Starts nothing."""
    ray = import_ray()
    from tandem.cluster.on_ray import launcher

    monkeypatch.setattr(launcher, "_REACH_AGAIN_S", 0.0)
    unreached = ray.exceptions.ActorUnavailableError(
        "RPC error: recvmsg: Connection reset by peer", b"a" * 16
    )
    outcomes = iter([unreached, unreached, False, ray.exceptions.ActorDiedError()])
    asked = 0

    class Hold:
        def remote(self, seconds: float) -> object:
            async def outcome() -> bool:
                nonlocal asked
                asked += 1
                next_one = next(outcomes)
                if isinstance(next_one, Exception):
                    raise next_one
                return bool(next_one)

            return outcome()

    actor = SimpleNamespace(hold=Hold())

    async def work() -> str:
        handle = launcher.RayHandle("decode-0", lambda config: True, lambda: actor, 1.0)
        monkeypatch.setattr(handle, "_running", no_actor)
        return await asyncio.wait_for(handle.ended(), 5)

    async def no_actor() -> None:
        return None

    assert asyncio.run(work()) != "it was stopped"
    assert asked == 4, "asked again after each broken connection, and not after the death"


@pytest.mark.slow
def test_a_node_with_the_same_configuration_is_adopted_also_when_its_role_was_changed() -> None:
    """Slow: imports Ray. Starts nothing."""
    import_ray()
    from tandem.cluster.on_ray.launcher import is_same_node

    running = msgspec.msgpack.encode(NODE)
    assert is_same_node(running, NODE)
    assert is_same_node(running, replace(NODE, role=Role.DECODE))
    assert is_same_node(running, replace(NODE, role=Role.AGGREGATED, transfer=None))
    assert not is_same_node(running, replace(NODE, host="10.0.0.3"))
    assert not is_same_node(running, replace(NODE, cores=[0]))
    other = EngineConfig(cache=CacheConfig(memory_bytes=1 << 30))
    assert not is_same_node(running, replace(NODE, engine=other))
