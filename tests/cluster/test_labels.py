"""The machines that a label selector matches, compared with Ray's own matching."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.labels import matches, wrong_in

CONDITIONS = st.one_of(
    st.text("ab!in(), -_.", max_size=12),
    st.sampled_from(["a", "!a", "in(a, b)", "in(a,b)", "!in(a)", "in()", "!!a", "a b", "", "a_", "in(a, b", "!in(a-b, c.d)"]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "taken"),
    [("a", ["a"]), ("!a", ["b", "c", None]), ("in(a, b)", ["a", "b"]), ("!in(a,b)", ["c", None])],
)
def test_a_condition_takes_these_machines_and_no_others(condition: str, taken: list[str | None]) -> None:
    labels: dict[str | None, dict[str, str]] = {value: {"zone": value} for value in ("a", "b", "c")}
    labels[None] = {"rack": "a"}
    assert [value for value, of in labels.items() if matches(of, {"zone": condition})] == taken


def test_all_conditions_must_hold() -> None:
    selector = {"zone": "a", "ray.io/accelerator-type": "in(H100, H200)"}
    assert matches({"zone": "a", "ray.io/accelerator-type": "H200"}, selector)
    assert not matches({"zone": "a"}, selector)
    assert matches({}, {})


@given(CONDITIONS)
def test_what_is_allowed_here_ray_allows_too(condition: str) -> None:
    from ray._private.label_utils import validate_label_selector

    if not list(wrong_in({"zone": condition})):
        assert validate_label_selector({"zone": condition}) is None
