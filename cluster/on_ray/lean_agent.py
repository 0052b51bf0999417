"""Stands in for the agent that a raylet starts, waits for and cannot do without, and that only serves Ray's dashboard: tells the raylet that
it has no ports, as Ray's own does where the dashboard is not installed, and ends with it. Ray's own imports for a second of each start; a
busy machine does not give it that within the 15 s for which the raylet waits.

A script for an interpreter without packages: lean_agent.py RAY'S-AGENT ARGUMENTS
"""

import os
import select
import sys

_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def main(arguments: list[str]) -> None:
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    named = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for port in _PORTS:
        path = os.path.join(named["--session-dir"], f"{port}_{named['--node-id']}")
        with open(f"{path}.new", "w") as file:
            file.write("-1")
        os.rename(f"{path}.new", path)
    select.select([raylet], [], [])


if __name__ == "__main__":
    main(sys.argv[1:])
