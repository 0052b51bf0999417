"""Adapters change while the cluster serves: every node gets them or none does, even if a controller dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.cluster.cli import main
from tandem.cluster.config import RolloutConfig, TandemConfig
from tandem.cluster.pools import state, wings
from tandem.router.config import RouterConfig
from tests.cluster.pools.helpers import TIMEOUTS, Rig, settle, started
from tests.cluster.pools.pools_rig import PD, needs_rollouts, with_seqs

replace = msgspec.structs.replace
SQL, LAW = "/adapters/sql", "me/law"
NODES = ("prefill-0", "decode-0")


def with_room(adapters: dict[str, str] | None = None, max_loras: int = 2) -> TandemConfig:
    base = TandemConfig(router=RouterConfig("model", "fake"), rollout=RolloutConfig(settle_s=1.0))
    model = replace(base.model, adapters=adapters or {})
    return replace(base, model=model, scheduler=replace(base.scheduler, max_loras=max_loras))


@asynccontextmanager
async def serving(adapters: dict[str, str] | None = None) -> AsyncIterator[Rig]:
    async with started(*PD, config=with_room(adapters)) as rig:
        yield rig


async def changed(rig: Rig, load: dict[str, str], unload: list[str], beats: float = 1.0) -> dict[str, str]:
    return await rig.during(rig.controller.adapters(load, unload), beats * TIMEOUTS.heartbeat_s)


def served(rig: Rig) -> list[dict[str, str]]:
    return [rig.node(name).adapters for name in NODES]


def refusal(rig: Rig, name: str, error: TandemError | None) -> None:
    rig.node(name).adapter_error = error


async def test_nodes_have_the_configurations_before_they_are_announced_and_the_same_again_changes_nothing() -> None:
    async with serving({"sql": SQL}) as rig:
        assert served(rig) == [{"sql": SQL}] * 2
        assert all(rig.node(name).routed_when_told is False for name in NODES)
        assert rig.node("decode-0").config.engine.model.adapters == {}
        told = rig.node("decode-0").times_told
        assert await rig.controller.adapters({}, []) == {"sql": SQL}
        assert await rig.controller.adapters({"sql": SQL}, []) == {"sql": SQL}
        assert rig.node("decode-0").times_told == told


async def test_they_are_loaded_and_unloaded_on_every_node_and_routers_serve_them() -> None:
    async with serving() as rig:
        loading = asyncio.create_task(rig.controller.adapters({"sql": SQL, "law": LAW}, []))
        await settle()
        assert served(rig) == [{"sql": SQL, "law": LAW}] * 2
        assert not loading.done(), "the router was not heard to serve them"
        await rig.clock.advance(TIMEOUTS.heartbeat_s)
        assert await loading == {"sql": SQL, "law": LAW}
        assert await changed(rig, {}, ["sql"]) == {"law": LAW}
        assert served(rig) == [{"law": LAW}] * 2
        assert (await rig.decided())[-1] == "the adapter sql was unloaded, as asked"


async def test_a_node_that_refuses_keeps_all_as_it_was() -> None:
    async with serving({"law": LAW}) as rig:
        refusal(rig, "decode-0", ConfigurationError("the adapter 'sql' has rank 64"))
        with pytest.raises(ConfigurationError, match="decode-0: the adapter 'sql' has rank 64"):
            await rig.controller.adapters({"sql": SQL}, ["law"])
        refusal(rig, "decode-0", None)
        assert await rig.controller.adapters({}, []) == {"law": LAW}
        await rig.clock.advance(5 * TIMEOUTS.heartbeat_s)
        refusal(rig, "decode-0", Unavailable("a long step"))
        with pytest.raises(Unavailable, match="decode-0 did not confirm the adapters"):
            await rig.controller.adapters({"sql": SQL}, [])
        rig.node("decode-0").adapters = {"who": "knows"}
        refusal(rig, "decode-0", None)
        await rig.clock.advance(3 * TIMEOUTS.heartbeat_s)
        assert served(rig) == [{"law": LAW}] * 2
    async with serving() as rig:
        rig.node("decode-0").files = "other"
        with pytest.raises(ConfigurationError, match="'sql' has other files on decode-0's machine"):
            await rig.controller.adapters({"sql": SQL}, [])
        assert served(rig) == [{}] * 2


async def test_a_controller_that_dies_in_the_middle_leaves_what_was_kept() -> None:
    async with serving({"law": LAW}) as rig:
        rig.node("decode-0").mute.set()
        changing = asyncio.create_task(rig.controller.adapters({"sql": SQL}, []))
        await settle()
        assert rig.node("prefill-0").adapters == {"law": LAW, "sql": SQL}
        await rig.kill_controller()
        assert changing.cancelled()
        rig.node("decode-0").mute.clear()
        await rig.start()
        await rig.clock.advance(3 * TIMEOUTS.heartbeat_s)
        assert served(rig) == [{"law": LAW}] * 2
        assert len(rig.launcher.nodes["prefill-0"]) == 1, "it was adopted"


async def test_what_was_loaded_is_known_to_the_next_controller_and_to_a_node_that_starts_again() -> None:
    async with serving() as rig:
        await changed(rig, {"sql": SQL}, [])
        await rig.next_controller()
        assert await rig.controller.adapters({}, []) == {"sql": SQL}
        rig.node("decode-0").die()
        await rig.clock.advance(20 * TIMEOUTS.heartbeat_s)
        assert len(rig.launcher.nodes["decode-0"]) == 2
        assert served(rig) == [{"sql": SQL}] * 2
        assert not rig.node("decode-0").routed_when_told


async def test_a_router_that_does_not_serve_them_is_named() -> None:
    async with serving() as rig:
        rig.launcher.router.hears_adapters = False
        with pytest.raises(Unavailable, match="every node has the change, but router did not confirm it"):
            await changed(rig, {"sql": SQL}, [], 2 * TIMEOUTS.unresponsive_s)
        assert await rig.controller.adapters({}, []) == {"sql": SQL}


async def test_what_cannot_be_meant_is_refused_before_a_node_hears_of_it() -> None:
    async with serving({"law": LAW}) as rig:
        told = rig.node("decode-0").times_told
        for load, unload, says in (
            ({"fake": SQL}, [], "the model's own name"),
            ({"a b": SQL}, [], "cannot be called 'a b'"),
            ({"sql": "./sql"}, [], "must be a folder's whole path"),
            ({"sql": ""}, [], "must be a folder's whole path"),
            ({}, ["sql"], "there is no adapter 'sql'; there are: law"),
            ({"law": SQL}, ["law"], "both loaded and unloaded"),
        ):
            with pytest.raises(ConfigurationError, match=says):
                await rig.controller.adapters(load, unload)
        assert rig.node("decode-0").times_told == told
    async with started(*PD, config=with_room(max_loras=0)) as rig:
        assert rig.node("decode-0").times_told == 0
        with pytest.raises(ConfigurationError, match=r"model\.adapters needs scheduler\.max_loras"):
            await rig.controller.adapters({"sql": SQL}, [])


@needs_rollouts
async def test_a_configuration_with_other_adapters_replaces_nodes_and_a_rollout_refuses_changes() -> None:
    both = {"law": LAW, "sql": SQL}
    async with serving({"law": LAW}) as rig:
        await changed(rig, {"sql": SQL}, [])
        same = with_seqs(rig.config)
        change = await rig.controller.apply(same, dry_run=False)
        assert change.nodes == ["scheduler.max_num_seqs"]
        with pytest.raises(Unavailable, match="a rollout is replacing nodes"):
            await rig.controller.adapters({}, ["sql"])
        await rig.clock.advance(60.0)
        assert await rig.controller.adapters({}, []) == both, "it has the same adapters"
        assert all(node.adapters == both for node in rig.launcher.running)
        other = replace(same, model=replace(same.model, adapters={"tax": LAW}))
        change = await rig.controller.apply(other, dry_run=False)
        assert change.nodes == ["model.adapters.law", "model.adapters.tax"]
        await rig.controller.go_back()
        await rig.clock.advance(60.0)
        assert (await rig.controller.view()).rollout is None
        assert await rig.controller.adapters({}, []) == both
        assert all(node.adapters == both for node in rig.launcher.running)
        await rig.controller.apply(other, dry_run=False)
        await rig.clock.advance(60.0)
        assert (await rig.controller.view()).rollout is None
        assert await rig.controller.adapters({}, []) == {"tax": LAW}
        assert all(node.adapters == {"tax": LAW} for node in rig.launcher.running)


def test_what_an_earlier_version_kept_has_the_configurations_adapters() -> None:
    old = state.decode(state.encode(state.first_state(with_room().pools)))
    assert old.revision.adapters is None


def test_a_cluster_that_does_not_answer_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters", "--address", "127.0.0.1:9"]) == 1
    assert "nothing answers at 127.0.0.1:9" in capsys.readouterr().err


async def test_without_this_wing_a_change_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wings, "ROWS", ())
    async with serving({"sql": SQL}) as rig:
        with pytest.raises(ConfigurationError, match=r"name them in model\.adapters"):
            await rig.controller.adapters({"law": LAW}, [])
        assert served(rig) == [{"sql": SQL}] * 2
