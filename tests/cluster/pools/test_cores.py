"""Several hosts on one machine divide its cores among themselves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.pools.placement import MachineFacts, share_cores

MACHINES = st.dictionaries(
    st.integers(0, 9).map("host-{}".format),
    st.sampled_from([MachineFacts("a", (0, 1, 2, 3)), MachineFacts("b", (0, 1)), MachineFacts("c", (5,))]),
)


@pytest.mark.parametrize(
    ("hosts", "cores", "shares"),
    [
        ("h", (0, 4, 1, 5), [(0, 4, 1, 5)]),
        ("pd", (0, 1, 2), [(0, 1), (2,)]),
        ("abcde", (0, 1), [(0,), (1,), (0,), (1,), (0,)]),
    ],
    ids=["alone", "the odd core", "in turns"],
)
def test_hosts_of_one_machine_divide_its_cores(
    hosts: str, cores: tuple[int, ...], shares: list[tuple[int, ...]]
) -> None:
    assert list(share_cores({name: MachineFacts("a", cores) for name in hosts}, {}).values()) == shares


def test_one_that_comes_later_takes_what_is_used_least_and_no_more_than_its_quota_has_time_for() -> None:
    found = {name: MachineFacts("a", (0, 1, 2, 3)) for name in "pd"}
    given_ = share_cores(found, {})
    later = share_cores(found | {"x": MachineFacts("a", (0, 1, 2, 3))}, given_ | {"gone": (0, 1)})
    assert later == given_ | {"x": (0,)}
    pods = {"p": MachineFacts("a", tuple(range(64)), quota=2), "d": MachineFacts("a", tuple(range(64)), quota=4)}
    assert share_cores(pods, {}) == {"p": (0, 1), "d": (2, 3, 4, 5)}
    tight = {name: MachineFacts("a", (0, 1, 2), quota=2) for name in "pd"}
    assert share_cores(tight, {}) == {"p": (0, 1), "d": (2,)}, "an equal share may be less than a quota"


@given(MACHINES, MACHINES)
def test_everybody_has_cores_nobody_loses_any_and_they_are_used_evenly(
    before: dict[str, MachineFacts], came: dict[str, MachineFacts]
) -> None:
    given_ = share_cores(before, {})
    found = came | before
    shares = share_cores(found, given_)
    assert shares.keys() == found.keys()
    assert all(shares[name] == given_[name] for name in before)
    for name, one in found.items():
        assert shares[name]
        assert set(shares[name]) <= set(one.cores)
    for machine in {one.machine for one in before.values()}:
        used = Counter(core for name in before if before[name].machine == machine for core in given_[name])
        assert max(used.values()) - min(used.values()) <= 1, "cores shared while others lie idle"
