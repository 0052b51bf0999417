"""Places for nodes, and the message when there are too few."""

from __future__ import annotations

from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.launcher import Offer, TakenPlace
from tandem.cluster.pools.room import lacking, places, places_left
from tandem.wire.nodes import Role


def config(prefill: PoolConfig, decode: PoolConfig) -> TandemConfig:
    return TandemConfig(pools=PoolsConfig(prefill=prefill, decode=decode))


def test_a_machine_has_as_many_places_as_its_scarcest_resource_allows() -> None:
    offers = Offer({"prefill": 1.0, "decode": 3.0, "GPU": 4.0})
    assert places(offers, {}) == {Role.PREFILL: 1, Role.DECODE: 3}
    assert places(offers, {Role.DECODE: Offer({"GPU": 2})}) == {Role.PREFILL: 1, Role.DECODE: 2}
    assert places(Offer({"decode": 1.0}), {Role.DECODE: Offer({"GPU": 1})}) == {}


def test_a_machine_without_the_labels_that_a_pool_wants_has_no_place_for_it() -> None:
    needs = {Role.DECODE: Offer({}, {"zone": "in(a, b)"})}
    both = {"prefill": 1.0, "decode": 1.0}
    assert places(Offer(both, {"zone": "b"}), needs) == {Role.PREFILL: 1, Role.DECODE: 1}
    assert places(Offer(both, {"zone": "c"}), needs) == {Role.PREFILL: 1}
    assert places(Offer(both), needs) == {Role.PREFILL: 1}


def test_what_no_machine_offers_is_said_with_how_to_offer_it() -> None:
    one, following = PoolConfig(nodes=1), PoolConfig(nodes=None)
    assert lacking(config(one, one), [Offer({"prefill": 1.0}), Offer({"decode": 2.0})]) == []
    wanted = config(PoolConfig(nodes=2), PoolConfig(nodes=1, resources={"GPU": 1}))
    prefill, decode = lacking(wanted, [Offer({"prefill": 1.0, "decode": 4.0})])
    assert "pools.prefill wants 2 nodes, but the cluster's machines have room for 1" in prefill
    assert "no room for any" in decode
    assert """ray start --resources '{"decode": 1, "GPU": 1}'""" in decode
    wanted = config(one, PoolConfig(nodes=1, label_selector={"zone": "!a"}))
    (said,) = lacking(wanted, [Offer({"prefill": 1.0, "decode": 1.0}, {"zone": "a"})])
    assert said.startswith("pools.decode wants 1 node, but the cluster's machines have no room for any")
    assert "with the labels {zone: !a} (ray start --resources '{\"decode\": 1}' --labels KEY=VALUE" in said
    together = PoolsConfig(prefill=PoolConfig(), decode=PoolConfig(), aggregated=following)
    for asked, pool in ((config(following, following), "decode"), (TandemConfig(pools=together), "aggregated")):
        (said,) = lacking(asked, [])
        assert f"pools.{pool} wants 1 node" in said


def test_nodes_that_were_made_with_other_needs_stay_and_others_get_what_they_leave() -> None:
    machine = Offer({"decode": 4.0, "prefill": 1.0, "GPU": 4.0}, {"zone": "a"})
    two_gpus = {Role.DECODE: Offer({"GPU": 2}), Role.PREFILL: Offer({"GPU": 1})}
    old = [TakenPlace("m", Role.DECODE, Offer({"decode": 1.0, "GPU": 1}))] * 2
    assert places_left(machine, two_gpus, old) == {Role.DECODE: 3, Role.PREFILL: 1}, "two GPUs are left"
    assert places_left(machine, two_gpus, old[:1]) == {Role.DECODE: 2, Role.PREFILL: 1}
    assert places_left(machine, two_gpus, []) == {Role.DECODE: 2, Role.PREFILL: 1}
    elsewhere = {Role.DECODE: Offer({}, {"zone": "b"})}
    assert places_left(machine, elsewhere, old) == {Role.DECODE: 2, Role.PREFILL: 1}, "what is there, and no more"
    same = [TakenPlace("m", Role.DECODE, Offer({"decode": 1.0, "GPU": 2}))]
    assert places_left(machine, two_gpus, same) == places(machine, two_gpus)
