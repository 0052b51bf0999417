"""How a running cluster applies a change of each setting."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.cluster.config import PoolConfig, PoolsConfig, RolloutConfig, TandemConfig
from tandem.cluster.pools.changes import applied, difference
from tandem.wire.nodes import Role

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
