"""Starts a Ray of our own without the processes that only serve people who look at Ray itself: its dashboard, its log monitor and its
autoscaler. A start waits a second for the dashboard, and all three take an eighth of its CPU.

`ray.init` has no options for them. To have them, start Ray with `ray start --head`, and name it with --address.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def fewer_processes() -> Iterator[None]:
    """While entered, a head that this process starts has a control store, a raylet and the raylet's agents."""
    from ray._private import node, parameter

    all_params, head = parameter.RayParams, node.Node

    class FewParams(all_params):  # type: ignore[misc, valid-type]  # Ray has no types
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.no_monitor = True
            self.include_log_monitor = False
            # Its usual port belongs to one Ray of the machine. The agent of another one would try for it for three seconds.
            self.dashboard_agent_listen_port = 0

    start_api_server = head.start_api_server
    parameter.RayParams = FewParams
    head.start_api_server = lambda self, **options: None
    try:
        yield
    finally:
        parameter.RayParams = all_params
        head.start_api_server = start_api_server
