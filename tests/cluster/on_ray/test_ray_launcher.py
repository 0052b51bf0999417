"""Which running processes a restarted controller adopts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace

import msgspec
import pytest

from tandem.base.settings import without_defaults
from tandem.cluster.on_ray.runtime import import_ray
from tandem.engine.config import CacheConfig, EngineConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role


async def latest() -> None: ...


NODE = NodeConfig(node_id="prefill-0", role=Role.PREFILL, host="10.0.0.2", transfer=TransferConfig(), cores=[0, 1])
replace = msgspec.structs.replace


async def hold_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[object], machine: str = "", alive: Iterable[bool] = ()
) -> tuple[str, int]:
    """What `ended` says when `hold` comes to these outcomes, and how often it was called. `alive`: what Ray says of the machine
    each time."""
    from tandem.cluster.on_ray import handles

    monkeypatch.setattr(handles, "_REACH_AGAIN_S", 0.0)
    told, said = iter(outcomes), iter(alive)
    monkeypatch.setattr(handles, "ray_nodes", lambda: [{"NodeID": machine, "Alive": next(said)}])
    asked = 0

    class Hold:
        def remote(self, seconds: float) -> object:
            async def outcome() -> bool:
                nonlocal asked
                asked += 1
                next_one = next(told)
                if isinstance(next_one, Exception):
                    raise next_one
                return bool(next_one)

            return outcome()

    async def no_actor() -> None:
        return None

    actor = SimpleNamespace(hold=Hold())
    handle = handles.RayHandle("decode-0", "tandem", lambda config: True, lambda: actor, latest, 1.0, machine)
    monkeypatch.setattr(handle, "_running", no_actor)
    return await asyncio.wait_for(handle.ended(), 5), asked


@pytest.mark.slow
async def test_a_broken_connection_is_no_end_and_the_word_of_a_death_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: imports Ray. Starts nothing. Ray takes all that runs on a machine that it does not see for dead."""
    ray = import_ray()
    unreached = ray.exceptions.ActorUnavailableError("RPC error: recvmsg: Connection reset by peer", b"a" * 16)
    died = ray.exceptions.ActorDiedError()
    said, asked = await hold_until_it_ends(monkeypatch, [unreached, unreached, False, died])
    assert said != "it was stopped"
    assert asked == 4, "asked again after each broken connection, and not after the death"
    said, asked = await hold_until_it_ends(monkeypatch, [died] * 9, "5c", [False, False, True])
    assert said != "it was stopped"
    assert asked == 3


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
    assert not is_same_node(running, replace(NODE, env={"UCX_TLS": "tcp"}))
    other = EngineConfig(cache=CacheConfig(memory_bytes=1 << 30))
    assert not is_same_node(running, replace(NODE, engine=other))


def test_a_router_whose_tokenizer_is_found_elsewhere_now_is_adopted() -> None:
    from tandem.cluster.on_ray.launcher import is_same_router

    config = RouterConfig(tokenizer_path="old", model_name="m")
    running = msgspec.msgpack.encode(config)
    assert is_same_router(running, replace(config, tokenizer_path="new"))
    assert not is_same_router(running, replace(config, port=9))


@pytest.mark.slow
def test_what_another_version_made_is_adopted_unless_a_setting_is_another() -> None:
    """Slow: imports Ray. Starts nothing. A process made by the version before names no field that came later, and none at its default."""
    import_ray()
    from tandem.cluster.on_ray.launcher import is_same_node

    tree = without_defaults(NODE)
    assert "env" not in tree
    assert is_same_node(msgspec.msgpack.encode(tree), NODE)
    assert not is_same_node(msgspec.msgpack.encode({**tree, "host": "10.0.0.3"}), NODE)
    with pytest.raises(msgspec.ValidationError, match="of_a_later_version"):
        is_same_node(msgspec.msgpack.encode({**tree, "of_a_later_version": 8}), NODE)
