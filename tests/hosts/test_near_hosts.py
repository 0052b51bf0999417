"""Handovers go round a slow link where another host can write the answer as soon."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cluster import FaultCluster
from lab import Lab
from lab_model import KV_BYTES_PER_TOKEN, VOCABULARY, make_tiny_model
from links import limit
from serving import give_model
from tools import lab_or_skip

pytestmark = [pytest.mark.timeout(600), pytest.mark.integration]

TOKENS = 200
SLOW = "20mbit"
# Sends prompts one after another, and prints how each was routed.
ASK = """
import http.client, json, sys
host, port, count, tokens, vocabulary = sys.argv[1], *map(int, sys.argv[2:])
for number in range(count):
    link = http.client.HTTPConnection(host, port, timeout=120)
    prompt = [(7 * number + 3 * at) % (vocabulary - 3) + 3 for at in range(tokens)]
    body = {"model": "model", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = link.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    print(json.dumps(answer.headers["x-tandem-decision"]))
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FaultCluster]:
    lab_or_skip()
    with Lab(tmp_path, hosts=5, ssh=False, boot_ids=True) as lab:
        model = give_model(lab, make_tiny_model(tmp_path / "model"))
        with FaultCluster(lab, model) as cluster:
            yield cluster


def writers(cluster: FaultCluster, count: int) -> list[str]:
    """Which decode node wrote each of so many answers."""
    words = (cluster.router.address, 8000, count, TOKENS, VOCABULARY)
    said = cluster.router.run(sys.executable, "-c", ASK, *map(str, words), timeout_s=300)
    decisions = [json.loads(line) for line in said.splitlines()]
    return [found[0] for decision in decisions if (found := re.findall(r"decode (decode-\d)", decision))]


def test_answers_are_written_where_the_handover_is_short(cluster: FaultCluster) -> None:
    view = json.loads(cluster.tandem("status", "-o", "json"))
    machines = {node["node_id"]: node["host"] for node in view["nodes"] if node["role"] == "decode"}
    assert set(writers(cluster, 6)) == set(machines)
    far = next(host for host in cluster.decode if host.address == machines["decode-1"])
    assert TOKENS * KV_BYTES_PER_TOKEN * 8 / 20e6 > 1.0, "seconds on the slow link"
    limit(far, SLOW)
    told = writers(cluster, 16)
    assert "decode-1" in told, "it is slow once or twice before that is known"
    assert told[-8:] == ["decode-0"] * 8
