"""A real cluster's nodes learn what their steps take, and commands simulate with that at once."""

from __future__ import annotations

import concurrent.futures
import json
import random
from typing import Any

import httpx
import pytest

from tandem.cluster.cli import main
from tests.integration.cluster_lab import START_S, free_port


def ask(url: str, seed: int) -> None:
    rng = random.Random(seed)
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": [rng.randrange(1000, 20000) for _ in range(rng.choice([20, 60, 150, 250]))],
        "max_tokens": 40,
        "ignore_eos": True,
    }
    httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False).raise_for_status()


def printed(out: str) -> dict[str, Any]:
    """The JSON that the command printed; `tandem serve` may print beside it."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(out, out.index("{\n"))[0]
    return found


@pytest.mark.more
def test_commands_simulate_with_what_the_nodes_have_learnt(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command = serve("--aggregated", "1", "--port", str(free_port()))
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    with concurrent.futures.ThreadPoolExecutor(2) as clients:
        list(clients.map(lambda seed: ask(url, seed), range(60)))
    capsys.readouterr()
    assert main(["what-if", "aggregated=2", "--url", url, "-o", "json"]) == 0
    change = printed(capsys.readouterr().out)
    assert (change["now"], change["then"], change["requests"]) == ("1 aggregated", "2 aggregated", 60)
    for figure in change["expected"]:
        assert 0.5 < figure["simulated"] / figure["measured"] < 2
    given = ["--rate", "1", "--duration", "20", "--input", "100", "--output", "20", "--aggregated", "1"]
    assert main(["simulate", "--costs", url, *given, "-o", "json"]) == 0
    said = capsys.readouterr()
    assert printed(said.out)["report"]["served"] > 0
    assert "costs that the nodes have learnt" in said.err
