"""One request's lines in the logs of the router and both nodes, by the id that its caller knows."""

from __future__ import annotations

from tandem.cluster.commands.logs import LogFilter, LogReader
from tests.cluster.direct_cluster import DirectController
from tests.integration.conftest import LoopThread, RunningDeployment


def test_a_request_is_found_in_every_process(server: RunningDeployment, loop_thread: LoopThread) -> None:
    # A decode node reads prompts itself while its router has not heard of a prefill node.
    server.until(lambda nodes: len(nodes) == 2 and all(node.get("free_blocks") for node in nodes), "both serve")
    answer = server.http.post(
        "/v1/completions",
        json={"model": server.model, "prompt": [5, 6, 7, 8] * 20, "max_tokens": 4, "cache_salt": "not read before"},
        headers={"x-request-id": "look-for-me"},
    )
    assert answer.status_code == 200
    server.until_quiet()
    reader, asked = (LogReader(LogFilter(request="look-for-me")), DirectController(server.deployment.control))
    lines, remarks = loop_thread.run(reader.look(asked))
    assert not remarks
    assert {line.process.partition("-")[0] for line in lines} >= {"router", "prefill", "decode"}
    everything, _ = loop_thread.run(LogReader(LogFilter()).look(asked))
    assert len(everything) > len(lines)
