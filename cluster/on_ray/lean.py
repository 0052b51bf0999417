"""Starts a Ray of our own without what only serves people who look at Ray itself: its dashboard and the dashboard's agent, its log monitor,
its autoscaler, and the figures that every process collects for them. A start waits for both parts of the dashboard.

`ray.init` has no options for them. To have them, start Ray with `ray start --head`, and name it with --address.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_AGENT = Path(__file__).with_name("lean_agent.py")


@contextmanager
def fewer_processes() -> Iterator[None]:
    """While entered, a head that this process starts has a control store, a raylet, and the raylet's agent for environments."""
    from ray._private import node, parameter, ray_constants, services

    os.environ.setdefault("RAY_enable_metrics_collection", "0")  # read by Ray's processes at their start
    all_params, head, python = (
        parameter.RayParams,
        node.Node,
        services._build_python_executable_command_memory_profileable,
    )

    class FewParams(all_params):  # type: ignore[misc, valid-type]  # Ray has no types
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.no_monitor = True
            self.include_log_monitor = False
            # Its usual port belongs to one Ray of the machine. The agent of another one would try for it for three seconds.
            self.dashboard_agent_listen_port = 0

    def command_of(component: str, *given: Any, **named: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", str(_AGENT)]
        return list(python(component, *given, **named))

    start_api_server = head.start_api_server
    services._build_python_executable_command_memory_profileable = command_of
    parameter.RayParams = FewParams
    head.start_api_server = lambda self, **options: None
    try:
        yield
    finally:
        services._build_python_executable_command_memory_profileable = python
        parameter.RayParams = all_params
        head.start_api_server = start_api_server
