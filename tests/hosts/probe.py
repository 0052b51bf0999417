"""Runs on the head of a cluster and answers questions about what Ray sees: one JSON object per line, in and out."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray

POOLS = ("prefill", "decode")


def pools() -> dict[str, list[str]]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {pool: sorted(node["NodeManagerAddress"] for node in alive if node["Resources"].get(pool)) for pool in POOLS}


def wait_for_pools(wanted: dict[str, list[str]], within_s: float) -> dict[str, list[str]]:
    deadline = time.monotonic() + within_s
    while (seen := pools()) != wanted and time.monotonic() < deadline:
        time.sleep(0.5)  # Ray announces no changes to its drivers
    return seen


def wait_for_count(pool: str, count: int, within_s: float) -> int:
    deadline = time.monotonic() + within_s
    while len(pools()[pool]) != count and time.monotonic() < deadline:
        time.sleep(0.5)  # Ray announces no changes to its drivers
    return len(pools()[pool])


def run_in_pool(pool: str, count: int, within_s: float) -> list[str]:
    """Runs `count` tasks that wait for each other, so each takes a place of its own; returns where they ran."""

    @ray.remote(num_cpus=0)
    class Meeting:
        def __init__(self) -> None:
            self.present: list[str] = []

        def arrive(self, address: str) -> None:
            self.present.append(address)

        def who(self) -> list[str]:
            return self.present

    @ray.remote(num_cpus=0, resources={pool: 1}, max_retries=0)
    def attend(meeting: Any) -> str:
        address = ray.util.get_node_ip_address()
        ray.get(meeting.arrive.remote(address))
        deadline = time.monotonic() + within_s
        while len(ray.get(meeting.who.remote())) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {count} nodes of {pool} took a task")
            time.sleep(0.2)
        return address

    meeting = Meeting.remote()  # type: ignore[attr-defined]
    return sorted(ray.get([attend.remote(meeting) for _ in range(count)], timeout=within_s))


QUESTIONS = {question.__name__: question for question in (pools, wait_for_pools, wait_for_count, run_in_pool)}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints to stdout, which must carry only answers
    ray.init(address="auto", log_to_driver=False)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = {"answer": QUESTIONS[arguments.pop("question")](**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
