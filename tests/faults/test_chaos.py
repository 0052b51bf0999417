"""`tandem chaos` against a cluster on Ray: the dry run changes nothing, and killing and stopping nodes costs no answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster_lab import MODEL, RayNodes, Tandem, free_port

SETTINGS = ("--model", MODEL, "--port", str(free_port()), "--kv-memory", "256MiB", "--dtype", "float32",
            "--max-model-len", "2560", "--prefill", "2", "--decode", "2")  # fmt: skip
RULES = ("--minutes", "0.6", "--every", "10", "--stop", "3", "--users", "3", "--seed", "4")
WITHIN_S = 400.0


@pytest.fixture(scope="module")
def tandem(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    nodes = RayNodes(prefill=2, decode=2)
    tandem = Tandem(nodes.address, tmp_path_factory.mktemp("operator"))
    said = tandem("serve", "--detach", *SETTINGS, timeout_s=240)
    tandem.url = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)[0]
    tandem.until_roles(prefill=2, decode=2)
    yield tandem
    tandem("down", "--now", status=None)
    nodes.close()


def test_the_dry_run_names_its_victims_and_touches_none(tandem: Tandem) -> None:
    said = tandem("chaos", *RULES)
    assert re.search(r"after +10 s: (kill|stop for 3 s) \S+", said)
    assert "nothing was done" in said
    assert "missing" not in tandem("status")
    plain = tandem("chaos", *RULES, "-o", "json")
    intent = json.loads(plain[plain.index("\n{") :])
    assert len(intent["plan"]) == 3
    assert intent["address"].rpartition(":")[2] == tandem.address.rpartition(":")[2]


@pytest.mark.timeout(600)
def test_what_is_killed_and_stopped_costs_no_answer_and_no_block(tandem: Tandem) -> None:
    said = tandem("chaos", *RULES, "--yes", "-o", "json", timeout_s=WITHIN_S, status=None)
    report: dict[str, Any] = json.loads(said[said.index("\n{") :])
    assert report["faults"] == []
    assert len(report["blows"]) == 3
    assert all(blow["whole_after_s"] is not None for blow in report["blows"])
    assert report["traffic"]["right"] == report["traffic"]["requests"] > 0
    assert report["blocks_back_after_s"] is not None
    assert any("3/N" in bound for bound in report["bounds"])
