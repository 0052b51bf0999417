"""What the benchmark of a batch beside users makes of the nodes' counters."""

from __future__ import annotations

from collections import Counter

from benchmarks.beside_batch import used_of_idle


def test_what_users_compute_is_not_idle() -> None:
    gained = Counter({"tandem_node_step_seconds_total": 110, "tandem_node_idle_seconds_total": 90})
    assert used_of_idle(gained, node_seconds=120.0) == 0.9
