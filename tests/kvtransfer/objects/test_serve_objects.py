"""`tandem serve` with an object store as a tier: a deployment that begins with nothing finds what one that has ended has left there, on
other roles; and a store that hangs, or whose content is distrusted, costs nothing but the time to compute."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster_lab import END_S, START_S, Serve, until_true
from tests.integration.test_serve_tiers import BLOCK, PROMPT, Client
from tests.kvtransfer.objects.seaweed import SeaweedStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
SETTINGS = """
cache:
  memory_bytes: 24MiB
  tiers:
    - spec: objects
      options: {{url: "{url}", credentials: {credentials}}}
      block_factor: 2
scheduler: {{max_model_len: 1024}}
router:
  local_prefill: never
  api_keys: [{{name: ops, key: {key}, operator: true}}]
"""
KEY = "operators-key"


class Deployment:
    def __init__(self, settings: Path, *pools: str) -> None:
        self.command = Serve("--config", str(settings), "--kv-memory", "24MiB", *pools)
        self.client = Client(self.command.until(r"^API: +(http://\S+)/v1$", START_S)[1], KEY)

    def tier(self, node_id: str) -> dict[str, Any]:
        return self.client.tiers(node_id)["objects"]

    def tandem(self, *words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "tandem.cluster.cli", *words, "--url", str(self.client.http.base_url)],
            check=True, text=True, capture_output=True, timeout=60, env={**os.environ, "TANDEM_API_KEY": KEY},
        ).stdout  # fmt: skip

    def end(self) -> None:
        self.command.process.terminate()
        assert self.command.process.wait(END_S) == 0
        self.command.nothing_left()


@pytest.fixture
def settings(seaweed: SeaweedStore, tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "tandem.yaml"
    url = f"{seaweed.bucket('kvcache')}/served"
    file.write_text(SETTINGS.format(url=url, credentials=seaweed.credentials, key=KEY))
    yield file
    seaweed.go_on()


def test_a_new_deployment_finds_what_another_has_left(
    settings: Path, seaweed: SeaweedStore, smollm2_path: Path
) -> None:
    draw = random.Random(11)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(PROMPT)] for _ in range(2)]
    begun: list[Deployment] = []
    try:
        begun.append(Deployment(settings, "--prefill", "1", "--decode", "1"))
        first = begun[-1]
        answers = [first.client.answer(prompt) for prompt in prompts]
        assert [cached for _, cached in answers] == [0, 0]
        until_true(lambda: first.tier("prefill-0")["stored_bytes"] > 0, "the prompts are in the store")
        until_true(lambda: len([n for n in seaweed.names("kvcache") if "/kv/" in n]) >= 2 * PROMPT // 32,
              "all of them")  # fmt: skip
        first.end()

        begun.append(Deployment(settings, "--aggregated", "1"))
        second = begun[-1]
        found, cached = second.client.answer(prompts[0])
        assert (found, cached) == (answers[0][0], PROMPT - BLOCK), "down to a block that is computed"
        until_true(lambda: second.tier("aggregated-0")["loaded_tokens"] == cached, "the node has told of it")
        assert "objects tier of aggregated-0:" in second.tandem("status")

        seaweed.hang()
        found, cached = second.client.answer(prompts[1])
        assert (found, cached) == (answers[1][0], 0), "it computes"
        until_true(lambda: "did not answer in time" in second.tier("aggregated-0")["left_out"], "it is left out")
        assert seaweed.host in second.tandem("status")
        seaweed.go_on()
        until_true(lambda: not second.tier("aggregated-0")["left_out"], "it is used again")

        second.tandem("reset-cache")
        second.end()
        begun.append(Deployment(settings, "--aggregated", "1"))
        assert begun[-1].client.answer(prompts[0]) == answers[0], "nothing that was forgotten is found"
        begun[-1].end()
    finally:
        for one in begun:
            one.command.kill_all()
