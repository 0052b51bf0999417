from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.cluster.chaos.plan import Blow, ChaosRules, ProcessKind, chosen_kinds, dangers, make_plan, processes_of
from tandem.wire.nodes import Role
from tests.cluster.chaos.views import cluster, node


@settings(max_examples=15)
@given(seed=st.integers(), minutes=st.floats(1, 60), every_s=st.floats(1, 50))
def test_the_same_seed_is_the_same_plan_and_every_blow_is_in_time(seed: int, minutes: float, every_s: float) -> None:
    rules = ChaosRules(seed=seed, minutes=minutes, every_s=every_s)
    plan = make_plan(rules, list(ProcessKind))
    assert plan == make_plan(rules, list(ProcessKind))
    moments = [strike.at_s for strike in plan]
    assert moments == sorted(moments)
    assert moments[-1] < minutes * 60
    names = [f"node-{number}" for number in range(5)]
    assert all(strike.choose(names) in names for strike in plan)


def test_over_time_every_kind_and_blow_and_process_has_its_turn() -> None:
    plan = make_plan(ChaosRules(minutes=100, every_s=10), [ProcessKind.PREFILL, ProcessKind.DECODE])
    assert {strike.kind for strike in plan} == {ProcessKind.PREFILL, ProcessKind.DECODE}
    assert {strike.blow for strike in plan} == set(Blow)
    assert {strike.choose(["a", "b", "c"]) for strike in plan} == {"a", "b", "c"}


def test_a_lone_router_is_struck_only_when_it_is_named_and_what_is_not_ready_is_no_victim() -> None:
    assert ProcessKind.ROUTER not in chosen_kinds(ChaosRules(), cluster(routers=1))
    assert ProcessKind.ROUTER in chosen_kinds(ChaosRules(), cluster(routers=2))
    assert chosen_kinds(ChaosRules(kinds=(ProcessKind.ROUTER,)), cluster(routers=1)) == [ProcessKind.ROUTER]
    with pytest.raises(ConfigurationError, match=r"aggregated.*prefill, decode"):
        chosen_kinds(ChaosRules(kinds=(ProcessKind.AGGREGATED,)), cluster())
    view = cluster(nodes=[node("prefill-0", Role.PREFILL), node("decode-0", Role.DECODE, "starting")])
    assert ProcessKind.DECODE not in processes_of(view)


@pytest.mark.parametrize(
    ("view", "kinds", "stop_s", "expected"),
    [
        (cluster(decode=1), [ProcessKind.DECODE], 1.0, "nothing is answered while it is away"),
        (cluster(prefill=1), [ProcessKind.PREFILL], 1.0, "decode nodes compute the prompts themselves"),
        (cluster(), [ProcessKind.ROUTER], 1.0, "every stream breaks when it ends"),
        (cluster(), [ProcessKind.PREFILL], 20.0, "taken for dead after 15 s"),
    ],
)
def test_dangers_to_users_are_told_before_anything_is_done(
    view: object, kinds: list[ProcessKind], stop_s: float, expected: str
) -> None:
    (said,) = dangers(view, kinds, 15.0, stop_s)  # type: ignore[arg-type]
    assert expected in said
    assert dangers(cluster(), [ProcessKind.PREFILL, ProcessKind.DECODE], 15.0, 5.0) == [], "two of everything"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"minutes": 0}, "--minutes"),
        ({"every_s": -1}, "--every"),
        ({"stop_s": float("inf")}, "--stop"),
        ({"minutes": 1, "every_s": 90}, "no time for a blow"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused_by_name(rules: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_plan(ChaosRules(**rules), [ProcessKind.DECODE])  # type: ignore[arg-type]
