"""Starting, watching, replacing, draining and stopping, against a launcher without processes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, InternalError, Unavailable
from tandem.cluster.config import ControllerConfig, PoolConfig, PoolsConfig, RolloutConfig, TandemConfig
from tandem.cluster.pools.changes import applied, difference
from tandem.cluster.pools.over_http import check_adapters, check_config
from tandem.cluster.pools.state import decode
from tandem.cluster.pools.turn import LaterController
from tandem.wire.nodes import NodeState, PoolReport, Role, RouterQueue
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, Rig, one_machine, settle, started
from tests.cluster.pools.pools_rig import PD, pools


async def test_everything_starts_at_once_and_the_router_learns_of_all_nodes_and_is_told_of_none_that_is_down() -> None:
    async with Rig(*PD) as rig:
        rig.hold("prefill-0", "decode-0", "router")
        start = asyncio.create_task(rig.controller.start())
        await settle()
        assert len(rig.launcher.everything) == 3, "all were launched before any was ready"
        assert not start.done()
        told: list[list[str]] = []
        router = rig.launcher.router
        router.on_members = lambda: told.append([name for pool in router.pools.values() for name in pool.down])
        for process in rig.launcher.everything:
            process.may_start.set()
            await settle()
        await start
        assert rig.routed == {"prefill-0", "decode-0"}
        assert rig.controller.url == "http://127.0.0.1:8000"
        assert rig.events.of("progress", "decode-0") == ["loading the weights"]
        assert len(told) > 1
        assert not any(told)


async def test_a_node_that_dies_is_out_at_once_and_comes_back_with_a_new_epoch() -> None:
    async with started(*PD) as rig:
        await settle()
        first = rig.node("decode-0")
        first.die("signal 9")
        await settle()
        assert rig.routed == {"prefill-0"}, "no time has passed"
        assert first.stopped
        assert "signal 9" in rig.launcher.router.pools[Role.DECODE].down["decode-0"]
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        assert rig.routed == {"prefill-0", "decode-0"}
        members = {member.node_id: member for member in rig.controller.members}
        assert members["decode-0"].epoch != first.info.epoch
        assert any("signal 9" in what for what in rig.events.of("trouble", "decode-0"))


async def test_restarts_of_a_node_that_keeps_dying_come_ever_later_until_one_has_served_for_long() -> None:
    async with started(*PD) as rig:
        expected = 1.0
        for earlier in range(1, 6):
            rig.node("decode-0").die()
            await rig.clock.advance(expected - 0.01)
            assert len(rig.launcher.nodes["decode-0"]) == earlier
            await rig.clock.advance(0.02)
            assert len(rig.launcher.nodes["decode-0"]) == earlier + 1
            expected = min(2 * expected, TIMEOUTS.restart_backoff_max_s)
        await rig.clock.advance(10 * TIMEOUTS.restart_backoff_max_s)
        rig.node("decode-0").die()
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        assert len(rig.launcher.nodes["decode-0"]) == 7


@pytest.mark.parametrize("fails", ["at once", "never ends"])
async def test_three_failures_in_a_row_at_start_leave_a_node_out_while_the_rest_serves(fails: str) -> None:
    async with Rig(*PD) as rig:
        if fails == "at once":
            rig.refuse("prefill-0", Unavailable("no memory"))
        else:
            rig.hold("prefill-0")
        await rig.start(3 * (TIMEOUTS.start_s + TIMEOUTS.restart_backoff_max_s))
        assert len(rig.launcher.nodes["prefill-0"]) == 3
        assert all(node.stopped for node in rig.launcher.nodes["prefill-0"])
        assert rig.routed == {"decode-0"}
        (reason,) = rig.events.of("gave_up", "prefill-0")
        assert "3 times in a row" in reason
        why = "no memory" if fails == "at once" else "made no progress for 100 s"
        assert why in reason
        pool = rig.launcher.router.pools[Role.PREFILL]
        assert why in pool.left_out["prefill-0"]
        assert pool == PoolReport(Role.PREFILL, 1, left_out=pool.left_out)


async def test_a_mistake_in_the_settings_is_not_tried_again() -> None:
    async with Rig(*PD) as rig:
        rig.refuse("prefill-0", ConfigurationError("no such model"))
        await rig.start()
        assert len(rig.launcher.nodes["prefill-0"]) == 1
        assert rig.events.of("gave_up", "prefill-0") == ["no such model"]


@pytest.mark.parametrize(("name", "slow"), [("router", "decode-0"), ("decode-0", "prefill-0")])
async def test_what_cannot_come_to_serve_is_said_before_the_rest_has_started(name: str, slow: str) -> None:
    async with Rig(*PD) as rig:
        rig.refuse(name, ConfigurationError("it lacks a file"))
        rig.hold(slow)
        with pytest.raises(Unavailable, match=rf"{name}.*: it lacks a file"):
            await rig.start()


async def test_a_process_that_dies_while_it_starts_is_noticed_at_once() -> None:
    async with Rig(*PD) as rig:
        rig.hold("decode-0")
        start = asyncio.create_task(rig.controller.start())
        await settle()
        rig.launcher.prepare.clear()
        rig.node("decode-0").die("killed by the kernel")
        await rig.clock.advance(TIMEOUTS.restart_backoff_s)
        await start
        assert any("killed by the kernel" in what for what in rig.events.of("trouble", "decode-0"))


async def test_a_late_answer_is_reported_and_costs_nobody_the_node() -> None:
    """The node itself tells the routers."""
    async with started(*PD) as rig:
        node = rig.node("decode-0")
        node.mute.set()
        await rig.clock.advance(TIMEOUTS.heartbeat_s + TIMEOUTS.silence_s + 0.1)
        assert rig.routed == {"prefill-0", "decode-0"}
        assert any("does not answer" in what for what in rig.events.of("trouble", "decode-0"))
        node.mute.clear()
        await rig.clock.advance(TIMEOUTS.heartbeat_s + TIMEOUTS.silence_s)
        assert rig.routed == {"prefill-0", "decode-0"}
        assert len(rig.launcher.nodes["decode-0"]) == 1, "a pause is no reason to end it"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda node: setattr(node, "state", NodeState.FAILED), "it failed: out of luck"),
        (lambda node: setattr(node, "step_age_s", TIMEOUTS.step_s + 1), "in one step for 51 s"),
        (lambda node: setattr(node, "epoch_in_status", 999), "another incarnation than the one that was started answers"),
    ],
)  # fmt: skip
async def test_a_node_that_cannot_be_trusted_is_replaced(spoil, why: str) -> None:
    async with started(*PD) as rig:
        first = rig.node("decode-0")
        spoil(first)
        await rig.clock.advance(TIMEOUTS.heartbeat_s + TIMEOUTS.restart_backoff_s + 0.1)
        assert first.stopped
        assert rig.node("decode-0") is not first
        assert any(why in what for what in rig.events.of("trouble", "decode-0"))


async def test_a_router_that_has_worked_is_never_given_up() -> None:
    async with started(*PD) as rig:
        rig.refuse("router", ConfigurationError("port 8000 is taken"), times=6)
        rig.launcher.router.die()
        await rig.clock.advance(10 * TIMEOUTS.restart_backoff_max_s)
        assert len(rig.launcher.routers) == 7
        assert rig.routed == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("fault", ["", "does not finish", "does not answer"])
async def test_a_drain_says_whether_all_was_finished_and_ends_although_a_node_does_not_answer(fault: str) -> None:
    async with started(*PD) as rig:
        rig.node("decode-0").drains = fault != "does not finish"
        if fault == "does not answer":
            rig.node("decode-0").mute.set()
        limit_s = TIMEOUTS.nodes.drain_s + TIMEOUTS.stop_s + 1
        assert await rig.during(rig.controller.drain(), limit_s) == (not fault)
        assert rig.launcher.router.drained_with == TIMEOUTS.nodes.drain_s
        drained = [rig.node(name).drained_with is not None for name, _ in PD]
        assert drained == [True, fault != "does not answer"]


async def test_stop_while_everything_is_still_starting_ends_all_of_it() -> None:
    async with Rig(*PD) as rig:
        rig.hold("prefill-0", "decode-0", "router")
        start = asyncio.create_task(rig.controller.start())
        await settle()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await rig.controller.stop()
        assert len(rig.launcher.everything) == 3
        assert all(process.stopped for process in rig.launcher.everything)
        await rig.controller.stop()


async def test_a_bug_in_supervision_fails_the_controller_and_one_while_starting_its_start() -> None:
    async def broken() -> None:
        raise RuntimeError("a bug")

    async with started(*PD) as rig:
        rig.node("decode-0").status = broken  # type: ignore[assignment, method-assign]
        failed = await rig.during(rig.controller.failed(), TIMEOUTS.heartbeat_s)
        assert "a bug" in failed
    async with Rig(*PD) as rig:
        rig.launcher.prepare["decode-0"] = lambda process, earlier: (_ for _ in ()).throw(RuntimeError("a bug"))
        with pytest.raises(InternalError, match="a bug"):
            await rig.start()


async def started_with_a_blind_router(rig: Rig) -> asyncio.Task[None]:
    """Starts a cluster whose router does not hear decode-0. The returned task waits for at most 30 s until it does."""
    blind = RouterQueue(out_of_view={"decode-0": "it has not reported its status yet"})
    rig.launcher.prepare["router"] = lambda router, earlier: setattr(router, "load", blind)
    await rig.start()
    return asyncio.create_task(rig.controller.until_in_view(30.0))


async def test_a_cluster_is_ready_when_its_router_hears_every_node() -> None:
    async with Rig(*PD) as rig:
        in_view = await started_with_a_blind_router(rig)
        await rig.clock.advance(0.9)
        assert not in_view.done()
        assert not rig.events.of("progress", "router"), "a short wait is not worth a word"
        await rig.clock.advance(1.0)
        assert "waiting for word of decode-0: it has not reported its status yet" in rig.events.of("progress", "router")
        rig.launcher.router.load = RouterQueue()
        await rig.clock.advance(TIMEOUTS.heartbeat_s)
        await in_view
        assert "sends requests to every node that serves" in rig.events.of("ready", "router")
        assert not rig.events.of("trouble", "router")


async def test_a_node_that_a_router_never_hears_is_told_of_and_the_rest_serves() -> None:
    async with Rig(*PD) as rig:
        in_view = await started_with_a_blind_router(rig)
        await rig.clock.advance(29.0)
        assert not in_view.done()
        await rig.clock.advance(2.0)
        await in_view
        unheard = "sends no requests to decode-0: it has not reported its status yet"
        assert rig.events.of("trouble", "router") == [unheard]


async def test_a_node_that_dies_is_not_waited_for_until_routers_hear_it() -> None:
    async with Rig(*PD) as rig:
        in_view = await started_with_a_blind_router(rig)
        await rig.clock.advance(2.0)
        rig.hold("decode-0")
        rig.node("decode-0").die()
        await settle()
        await in_view


async def test_an_older_controller_records_nothing_and_ends() -> None:
    async with started(pools=pools(1, 2), hosts=FakeHosts(one_machine(16))) as rig:
        older = rig.controller
        rig.controller = rig.new_controller()
        await rig.start()
        await rig.controller.scale({Role.DECODE: 3})
        await rig.clock.advance(1.0)
        with pytest.raises(LaterController, match="another controller has taken over"):
            await older.scale({Role.DECODE: 1})
        await settle()
        assert "another controller has taken over" in await older.failed()
        assert decode(rig.store.state).sizes[Role.DECODE] == 3
        assert len(rig.launcher.running) == 4
        await older._tasks.stop()


async def test_a_controller_that_slept_through_the_end_of_its_deployment_starts_nothing() -> None:
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.clock.advance(1.0)
        rig.store.state = None  # as `tandem down` leaves it
        told = len(rig.launcher.router.memberships)
        rig.clock.stand_still(30.0)
        await rig.clock.advance(20.0)
        assert len(rig.launcher.router.memberships) <= told + 1
        with pytest.raises(LaterController, match="has been ended"):
            await rig.controller.scale({Role.DECODE: 3})
        assert rig.store.state is None


async def test_an_older_controller_that_wakes_up_does_nothing_before_it_knows_that() -> None:
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        await rig.clock.advance(1.0)
        kept = decode(rig.store.state)
        rig.store.error = Unavailable("the control store is away")
        rig.clock.stand_still(30.0)
        told = len(rig.launcher.router.memberships)
        await rig.clock.advance(20.0)
        assert len(rig.launcher.router.memberships) <= told + 1, "it does not know whether it was replaced"
        rig.store.error = None
        await rig.clock.advance(20.0)
        assert len(rig.launcher.router.memberships) > told + 1, "it was not"
        assert decode(rig.store.state).writer == kept.writer
        assert rig.controller.members


async def test_a_record_that_changed_since_it_was_read_is_not_overwritten() -> None:
    """The older one, about to be replaced, confirms an order while the later one takes over."""
    async with started(pools=pools(1, 1), hosts=FakeHosts(one_machine(16))) as rig:
        older, store = rig.controller, rig.store
        load = store.load

        async def load_early() -> bytes | None:
            kept = await load()
            store.load = load  # type: ignore[method-assign]
            await older.scale({Role.DECODE: 2})
            return kept

        store.load = load_early  # type: ignore[method-assign]
        rig.controller = rig.new_controller()
        start = asyncio.create_task(rig.controller.start())
        await settle()
        assert "another controller" in await rig.controller.failed(), "the next one reads it again"
        await asyncio.gather(start, return_exceptions=True)
        await rig.controller._tasks.stop()
        rig.controller = older
        assert decode(store.state).sizes[Role.DECODE] == 2


replace = msgspec.structs.replace
CONFIG = TandemConfig()


def test_each_setting_is_read_by_nodes_or_applied_at_once_or_refused() -> None:
    wanted = replace(
        CONFIG,
        model=replace(CONFIG.model, path="other"),
        timeouts=replace(CONFIG.timeouts, start_s=1.0, nodes=replace(CONFIG.timeouts.nodes, drain_s=1.0)),
        rollout=RolloutConfig(surge=2),
        pools=PoolsConfig(
            prefill=PoolConfig(nodes=3, threads=2),
            decode=PoolConfig(nodes=None, max=4, resources={"GPU": 1}, label_selector={"zone": "a"}),
        ),
        router=replace(CONFIG.router, port=9, tokenizer_path="other", max_failovers=9),
        debug=True,
    )
    found = difference(CONFIG, wanted)
    assert found.sizes == {Role.PREFILL: 3, Role.DECODE: None}
    assert found.nodes == [
        "debug",
        "model.path",
        "pools.decode.label_selector.zone",
        "pools.decode.resources.GPU",
        "pools.prefill.threads",
        "timeouts.nodes.drain_s",
    ]
    assert found.at_once == ["pools.decode.max", "rollout.surge", "timeouts.start_s"]
    assert found.routers == ["router.max_failovers", "router.port"]
    assert found.refused == []
    kept = applied(CONFIG, wanted)
    assert kept.router == replace(CONFIG.router, port=9, tokenizer_path="other", max_failovers=9)
    assert kept.pools == wanted.pools
    left = difference(kept, wanted)
    assert (left.sizes, left.nodes, left.routers, left.at_once) == ({}, [], [], [])


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"env": {"UCX_TLS": "tcp"}}, {"env": {"UCX_TLS": "rc", "max": "min"}}, ["env.UCX_TLS", "env.max"]),
        ({}, {"engine_args": {"enforce_eager": True}}, ["engine_args.enforce_eager"]),
        (
            {"cache": {"block_size": 16}},
            {"cache": {"block_size": 32}, "scheduler": {"max_num_seqs": 4}},
            ["cache.block_size", "scheduler.max_num_seqs"],
        ),
    ],
)
def test_nodes_are_replaced_for_what_their_pool_sets_for_itself_and_its_values_are_not_told(
    before: dict[str, Any], after: dict[str, Any], named: list[str]
) -> None:
    running, wanted = (replace(CONFIG, pools=PoolsConfig(decode=PoolConfig(nodes=1, **own))) for own in (before, after))
    found = difference(running, wanted)
    assert found.nodes == [f"pools.decode.{name}" for name in named]
    assert (found.at_once, found.refused) == ([], [])
    assert applied(running, wanted).pools.decode == wanted.pools.decode


def test_a_deployment_keeps_its_name_and_the_address_that_its_routers_were_told() -> None:
    told = replace(CONFIG, router=replace(CONFIG.router, inbox_host="10.0.0.1"))
    assert not difference(told, CONFIG).refused
    assert difference(CONFIG, told).routers == ["router.inbox_host"]
    assert applied(told, CONFIG).router.inbox_host == "10.0.0.1"
    named = replace(CONFIG, name="chat")
    assert not difference(named, CONFIG).refused, "a router that is asked knows whose it is"
    assert difference(named, replace(CONFIG, name="code")).refused == ["name"]
    assert applied(named, CONFIG).name == "chat"


def config(**tree: Any) -> TandemConfig:
    base = msgspec.to_builtins(TandemConfig())
    return msgspec.convert(_merged(base, tree), TandemConfig)


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: _merged(base.get(key), value) for key, value in over.items()}


REFUSED: dict[str, dict[str, Any]] = {
    "router.env.LD_PRELOAD": {"router": {"env": {"LD_PRELOAD": "x.so"}}},
    "controller.env.PYTHONPATH": {"controller": {"env": {"PYTHONPATH": "x"}}},
    "pools.decode.env.BROWSER": {"pools": {"decode": {"env": {"BROWSER": "sh"}}}},
    "pools.prefill.transfer_options.x": {"pools": {"prefill": {"transfer_options": {"x": "1"}}}},
    "transfer.connector": {"transfer": {"connector": "os:system"}},
    "transfer.options.x": {"transfer": {"options": {"x": "1"}}},
    "controller.admin_may_run_code": {"controller": {"admin_may_run_code": True}},
    "controller.admin_folders": {"controller": {"admin_folders": ["/"]}},
    "model.path": {"model": {"path": "/etc"}},
    "model.engine_python": {"model": {"engine_python": "/tmp/python"}},
    "model.engine_args.worker_cls": {"model": {"engine_args": {"worker_cls": "os:system"}}},
    "model.draft": {"model": {"draft": "./here"}},
    "model.adapters.a": {"model": {"adapters": {"a": "/home/b/adapter"}}},
    "model.hidden_states_folder": {"model": {"hidden_states_folder": "states"}},
    "scheduler.trace_folder": {"scheduler": {"trace_folder": "/var/traces"}},
    "router.batches_folder": {"router": {"batches_folder": "batches"}},
    "router.chat_template": {"router": {"chat_template": "/etc/passwd"}},
    "router.api_keys_file": {"router": {"api_keys_file": "keys"}},
    "router.tls_certificate": {"router": {"tls_certificate": "/root/c", "tls_key": "/root/k"}},
    "router.tokenizer_path": {"router": {"tokenizer_path": "/srv/models-else"}},
    "cache.tiers": {"cache": {"tiers": [{"spec": "os:system"}]}},
    "pools.decode.cache.tiers": {"pools": {"decode": {"cache": {"tiers": [{"disk": "kv", "size": 1 << 20}]}}}},
    "pools.decode.scheduler.trace_folder": {"pools": {"decode": {"scheduler": {"trace_folder": "here"}}}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_run_programs_or_reach_files_is_refused_by_name(name: str) -> None:
    wanted = config(**REFUSED[name])
    with pytest.raises(ConfigurationError, match=r"cannot be changed over HTTP.*on a machine of the cluster") as told:
        check_config(config(), wanted, dry_run=False)
    assert str(told.value).startswith(name)
    check_config(wanted, wanted, dry_run=False)  # unchanged
    check_config(config(controller={"admin_may_run_code": True}), wanted, dry_run=False)


def test_other_settings_and_paths_in_a_configured_folder_are_changed() -> None:
    folders = {"admin_folders": ["/srv/models/"]}
    running = config(controller=folders, scheduler={"trace_folder": "/var/traces"})
    wanted = config(
        controller=folders,
        scheduler={"trace_folder": "", "max_num_seqs": 77},
        model={"path": "/srv/models/next", "adapters": {"a": "owner/name"}},
        router={
            "tokenizer_path": "/srv/models/next",
            "chat_template": "{{ messages }}",
            "api_keys": [{"key": "/key", "name": "ops"}],
        },
        pools={"decode": {"nodes": 3, "cache": {"memory_bytes": 1 << 30}}},
    )
    check_config(running, wanted, dry_run=False)
    for escape in ("/srv/models/../../etc", "/srv/models-else", "/srv", "srv/models/../.."):
        with pytest.raises(ConfigurationError, match=r"model\.path"):
            check_config(running, config(controller=folders, model={"path": escape}), dry_run=False)


def test_a_dry_run_may_ask_under_which_path_the_model_is_known() -> None:
    wanted = config(model={"path": "/here"}, router={"tokenizer_path": "/here"})
    check_config(config(), wanted, dry_run=True)
    with pytest.raises(ConfigurationError, match=r"model\.path, router\.tokenizer_path"):
        check_config(config(), wanted, dry_run=False)


def test_adapters_come_from_the_hub_or_from_a_configured_folder() -> None:
    controller = ControllerConfig(admin_folders=["/srv/adapters", "models", ""])  # the others are no whole paths
    loaded = {"old": "/home/old"}
    for where in ("owner/name", "/srv/adapters/new"):
        check_adapters(controller, loaded, {"new": where})
    check_adapters(controller, loaded, {"old": "/home/old"})
    for where in ("/home/new", "/srv/adapters/../new", "/srv/adapters-else", "/models/a"):
        with pytest.raises(ConfigurationError, match=r"admin_folders: /srv/adapters.*machine of the cluster"):
            check_adapters(controller, loaded, {"new": where})
    check_adapters(ControllerConfig(admin_may_run_code=True), {}, {"new": "/home/new"})
