"""How many nodes one machine may get, and the message when more are asked for."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import PoolConfig, TandemConfig
from tandem.cluster.describe import parse_size
from tandem.cluster.pools.placement import LocalMachine, place_nodes
from tandem.cluster.pools.room import AROUND_BYTES, NODE_BYTES, check_memory
from tandem.engine.config import CacheConfig
from tandem.kvtransfer.config import TierConfig
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import FakeHosts, started
from tests.cluster.pools.pools_rig import PD, machine, pools

MIB = 1 << 20
GIB = 1 << 30


def asked(prefill: PoolConfig | int = 1, decode: PoolConfig | int = 1, kv: int | None = None) -> TandemConfig:
    return TandemConfig(pools=pools(prefill, decode), cache=CacheConfig(memory_bytes=kv))


def cores(count: int) -> LocalMachine:
    return LocalMachine(tuple(range(count)))


def said_of_cores(config: TandemConfig, count: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        place_nodes(config, cores(count))
    return str(caught.value)


def said_of_memory(config: TandemConfig, free: int, weights: int = 0, *, on_cpu: bool = True) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_memory(config, free, weights, on_cpu=on_cpu)
    return str(caught.value)


# --- cores


def test_more_nodes_than_may_share_the_cores_are_refused_with_how_many_fit() -> None:
    assert said_of_cores(asked(64), 2) == (
        "64 prefill nodes and 1 decode node are too many for 2 cores: nodes that share a core slow each other "
        "down, and 4 per core are the most, 8 in all: ask for fewer (--prefill, --decode)"
    )
    said = said_of_cores(asked(decode=PoolConfig(nodes=1, max=30)), 2)
    assert "1 prefill node and 30 decode nodes" in said, "a pool counts as large as it may become"
    assert "(--prefill, pools.decode.max)" in said
    assert len(place_nodes(asked(7), cores(2))) == 8
    assert len(place_nodes(asked(9), LocalMachine(cores=()))) == 10, "where the cores are unknown"


async def test_a_pool_is_not_scaled_beyond_what_the_cores_of_the_only_machine_take() -> None:
    async with started(*PD) as rig:  # four cores
        await rig.controller.scale({Role.DECODE: 15})
        with pytest.raises(ConfigurationError, match=r"1 prefill node and 16 decode nodes are too many for 4 cores"):
            await rig.controller.scale({Role.DECODE: 16})
        await rig.controller.scale({Role.DECODE: 1})
    async with started(*PD, hosts=FakeHosts(machine("1", prefill=1, decode=9, cores=1))) as rig:
        await rig.controller.scale({Role.DECODE: 9})  # a machine that offers places says how many it takes


# --- memory


def test_caches_that_the_machine_cannot_hold_are_refused_with_what_it_can() -> None:
    said = said_of_memory(asked(kv=900 * GIB), 20 * GIB)
    assert said == (
        "2 nodes with 900.0 GiB of KV cache each need at least 1.8 TiB of memory, and 20.0 GiB is free on this machine: "
        "give each at most 9.3GiB (--kv-memory)"
    )
    said = said_of_memory(asked(3, 1, kv=6 * GIB), 20 * GIB)
    assert "4 nodes with 6.0 GiB of KV cache each need at least 26.0 GiB" in said
    assert "or ask for at most 3 nodes in all (--prefill, --decode)" in said
    check_memory(asked(kv=900 * GIB), None, 0, on_cpu=True)  # what is unknown is left to the nodes


def test_nodes_that_need_more_than_there_is_without_any_cache_are_refused() -> None:
    said = said_of_memory(asked(64, 2), 20 * GIB)
    assert "66 nodes need at least 25.2 GiB of memory, and 20.0 GiB is free on this machine" in said
    assert "at most 52 nodes in all" in said
    assert "--kv-memory" not in said
    together = "is free on this machine: serve with one node that does both (--aggregated 1)"
    assert said_of_memory(asked(), 1100 * MIB).endswith(together)
    for said in (said_of_memory(asked(), 600 * MIB), said_of_memory(asked(), 8 * GIB, weights=40 * GIB)):
        assert "end other processes on this machine" in said


def test_weights_count_for_every_node_that_holds_them_and_on_a_gpu_not_in_the_machines_memory() -> None:
    check_memory(asked(), 20 * GIB, 8 * GIB, on_cpu=True)
    assert "at least" in said_of_memory(asked(3, 1), 20 * GIB, 8 * GIB)
    check_memory(asked(kv=70 * GIB), 20 * GIB, 16 * GIB, on_cpu=False)
    assert "64 prefill" not in said_of_memory(asked(64), 20 * GIB, on_cpu=False)


@example(2, 2, 2 * GIB, AROUND_BYTES + 4 * (NODE_BYTES + 15 * (GIB // 10)), 0)  # hardly less than 1.5 GiB each
@given(st.integers(1, 9), st.integers(1, 9), st.integers(MIB, 1 << 42), st.integers(1, 1 << 42), st.integers(0, GIB))
def test_what_is_proposed_would_be_accepted(prefill: int, decode: int, kv: int, free: int, weights: int) -> None:
    try:
        check_memory(asked(prefill, decode, kv), free, weights, on_cpu=True)
    except ConfigurationError as error:
        said = str(error)
    else:
        assert AROUND_BYTES + (prefill + decode) * (NODE_BYTES + kv) <= free
        return
    less = re.search(r"at most (\S+) \(--kv-memory\)", said)
    fewer = re.search(r"at most (\d+) nodes in all", said)
    if less:
        check_memory(asked(prefill, decode, parse_size(less[1], "")), free, weights, on_cpu=True)
    if fewer:
        check_memory(asked(int(fewer[1]) - 1, 1, kv), free, weights, on_cpu=True)
    assert less or fewer or "--aggregated 1" in said or "end other processes" in said


def test_the_memory_of_tiers_counts_on_every_machine() -> None:
    config = asked()
    tiers = msgspec.structs.replace(config.cache, tiers=[TierConfig(cpu=10 * GIB)])
    said = said_of_memory(msgspec.structs.replace(config, cache=tiers), 8 * GIB, on_cpu=False)
    assert "10.0 GiB of cache.tiers each" in said
