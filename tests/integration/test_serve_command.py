"""`tandem serve` as a user runs it: it gets ready, answers, replaces failed processes, drains, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import make_pair
from tests.integration.cluster_lab import END_S, START_S, free_port


def ask(words: list[str]) -> dict[str, Any]:
    """Sends the request of the printed curl line, without curl."""
    url = next(word for word in words if word.startswith("http"))
    body = json.loads(words[words.index("-d") + 1])
    response = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def epochs(url: str) -> dict[str, str]:
    nodes = httpx.get(f"{url}/cluster", timeout=10, trust_env=False).json()["nodes"]
    return {node["node_id"]: node["incarnation"] for node in nodes if node["state"] == "ready"}


def test_it_serves_mends_what_dies_finishes_what_runs_and_leaves_nothing(serve: Any) -> None:
    command = serve("--prefill", "1", "--decode", "1")
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    line = command.until(r"^try it: +(curl .*)$", 10)[1]
    command.until(r"^stop: ", 10)
    assert "Paris" in ask(shlex.split(line))["choices"][0]["message"]["content"]

    before = epochs(url)
    os.kill(command.pid_of("ray::DecodeActor"), signal.SIGKILL)
    command.until(r"decode-0: its process ended", 10)
    deadline = time.monotonic() + START_S
    while "decode-0" not in (now := epochs(url)):
        assert time.monotonic() < deadline, "the decode node did not come back"
        time.sleep(0.1)
    assert now["decode-0"] != before["decode-0"]
    assert now["prefill-0"] == before["prefill-0"], "no other node is disturbed"
    assert "Paris" in ask(shlex.split(line))["choices"][0]["message"]["content"]

    body = {"model": "SmolLM2-135M-Instruct", "prompt": "Once upon", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        command.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]", "what was running was finished"
    command.until(r"everything was finished", END_S)
    assert command.ended() == 0


def test_a_background_answer_outlives_the_kill_of_the_only_router(serve: Any) -> None:
    # A replaced router comes back at the same port, so the test needs a port of its own.
    command = serve("--prefill", "1", "--decode", "1", "--port", str(free_port()))
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    body = {
        "input": "Tell a long story.",
        "max_output_tokens": 600,
        "background": True,
        "stream": True,
        "temperature": 0,
    }
    seen: list[dict[str, Any]] = []

    def read(lines: Iterator[str], most: int) -> None:
        for line in lines:
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
                if len(seen) >= most:
                    return

    with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60, trust_env=False) as stream:
        read(stream.iter_lines(), 20)
        os.kill(command.pid_of("ray::RouterActor"), signal.SIGKILL)
    path = f"{url}/v1/responses/{seen[0]['response']['id']}"
    query = {"stream": "true", "starting_after": seen[-1]["sequence_number"]}
    deadline = time.monotonic() + START_S
    while seen[-1]["type"] not in ("response.completed", "response.incomplete"):
        assert time.monotonic() < deadline, "no router streams the rest"
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("GET", path, params=query, timeout=60, trust_env=False) as stream,
        ):
            if stream.status_code == 200:
                read(stream.iter_lines(), 10_000)
                break
        time.sleep(0.2)
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    told = "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta")
    whole = httpx.get(path, timeout=60, trust_env=False).json()
    assert whole["output"][0]["content"][0]["text"] == told, "what was read over both routers is the answer"
    assert whole["usage"]["output_tokens"] > 20


def test_a_program_that_starts_it_reads_one_document_and_asks_over_tls(smollm2_path: Path, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server")
    command = [sys.executable, "-m", "tandem.cluster.cli", "serve", "--port", "0", "--kv-memory", "256MiB"]
    command += [
        "--aggregated",
        "1",
        "--timings",
        "-o",
        "json",
        "--ssl-certfile",
        str(pair.certificate),
        "--ssl-keyfile",
        str(pair.key),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            told = "".join(iter(process.stdout.readline, "}\n")) + "}"
            found = json.loads(told)
            assert found["url"].startswith("https://")
            assert {"model", "ray", "controller", "router", "aggregated-0"} <= {one["name"] for one in found["timings"]}
            assert all(one["began_s"] + one["seconds"] <= found["seconds"] + 0.2 for one in found["timings"])
            trusting = ssl.create_default_context(cafile=str(pair.certificate))
            with httpx.Client(base_url=found["url"], verify=trusting, timeout=60, trust_env=False) as client:
                assert client.get("/health").status_code == 200
                body = {"model": found["model"], "prompt": "Once upon", "max_tokens": 3}
                assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
            status = subprocess.run(
                [*command[:3], "status", "--url", found["url"]], capture_output=True, text=True, timeout=60, check=True,
                env={**os.environ, "SSL_CERT_FILE": str(pair.certificate)},
            )  # fmt: skip
            assert "aggregated-0" in status.stdout
            assert (found["model"], found["nodes"]) == ("SmolLM2-135M-Instruct", {"aggregated": 1})
            process.terminate()
            assert process.stdout.read() == "", "nothing but the document"
            assert process.wait(END_S) == 0
        finally:
            process.kill()


def test_a_second_signal_ends_at_once_what_is_still_running(serve: Any) -> None:
    command = serve("--aggregated", "1")
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": "Once upon",
        "max_tokens": 8000,
        "stream": True,
        "logit_bias": {"2": -100, "0": -100},
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        command.process.send_signal(signal.SIGTERM)
        command.until(r"finishing what is running", 10)
        time.sleep(1)  # signals in the same moment count once
        command.process.send_signal(signal.SIGTERM)
        command.until(r"ended before everything was finished", 10)
        rest = [line for line in lines if line]
    assert rest[-1] != "data: [DONE]", "a reply that was cut off does not look finished"
    assert command.ended() == 1


@pytest.mark.parametrize("moment", ["ray: starting", "ray: ready"])
def test_a_signal_while_it_starts_ends_it_and_leaves_nothing(serve: Any, moment: str) -> None:
    command = serve()
    command.until(moment, START_S)
    command.process.send_signal(signal.SIGTERM)
    assert command.ended() == 130


@pytest.mark.more
def test_a_signal_to_its_whole_group_while_it_starts_is_no_different(serve: Any) -> None:
    """`timeout` and similar programs signal a whole group of processes: Ray must not end first."""
    command = serve()
    command.until(r"router: loading", START_S)
    began = time.monotonic()
    os.killpg(command.process.pid, signal.SIGTERM)
    assert command.ended() == 130
    assert time.monotonic() - began < 30, "no wait for a Ray that is gone"


@pytest.mark.more
def test_a_command_whose_output_nobody_reads_any_more_serves_on(serve: Any) -> None:
    command = serve("--aggregated", "1")
    command.until(r"^API: ", START_S)
    line = command.until(r"^try it: +(curl .*)$", 10)[1]
    command.stop_reading()
    assert "Paris" in ask(shlex.split(line))["choices"][0]["message"]["content"]
    command.process.send_signal(signal.SIGTERM)
    assert command.ended() == 0


def test_a_command_that_is_killed_takes_everything_with_it(serve: Any) -> None:
    command = serve("--aggregated", "1")
    command.until(r"^API: ", START_S)
    command.process.kill()
    command.process.wait()
    # An idle agent of Ray waits a minute for its control store to come back before it ends.
    command.nothing_left(but=("ray::RuntimeEnvAgent",))
