"""The commands that ask a router, as they are typed: the command line, HTTP, and what a router answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.base.wings import is_there
from tandem.cluster.cli import main
from tandem.cluster.config import TandemConfig
from tandem.cluster.orders import act
from tandem.router.config import ApiKey
from tandem.wire.nodes import Role
from tests.cluster.test_admin import FakeCluster
from tests.router.conftest import RunningRouter, StartRouter


class RealActions:
    """What a router has of a cluster: its actions, done on a cluster that notes them."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()

    async def act(self, action: str, body: bytes) -> bytes:
        return await act(self.cluster.ask, action, body)


@pytest.fixture
def control() -> RealActions:
    return RealActions()


@pytest.fixture
def router(
    start_router: StartRouter, control: RealActions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RunningRouter:
    running = start_router(api_keys=(ApiKey("ops", "ops-key", operator=True),))
    running.server.services.control = control
    monkeypatch.setenv("TANDEM_API_KEY", "ops-key")
    monkeypatch.chdir(tmp_path)
    return running


Typed = Callable[..., Any]


@pytest.fixture
def typed(router: RunningRouter, capfdbinary: pytest.CaptureFixture[bytes]) -> Typed:
    """Types a command, with the router's URL and `-o json`, and returns what it prints."""

    def type_it(*words: str, status: int = 0) -> Any:
        capfdbinary.readouterr()
        assert main([*words, "--url", router.url, "-o", "json"]) == status
        return json.loads(capfdbinary.readouterr().out)

    return type_it


COMMANDS: list[tuple[Sequence[str], Any, Any]] = [
    (("pause", "decode"), {"paused": ["decode"]}, ("pause", ["decode"])),
    (("resume",), {"paused": []}, ("resume", [])),
    (("reset-cache",), {"reset": ["decode-0"]}, ("reset_cache", [])),
    (("scale", "decode=2"), {"changes": ["decode: from 1 to 2"]}, ("scale", {Role.DECODE: 2})),
    (("role", "decode-0", "prefill"), {"node": "decode-0", "role": "prefill"}, ("change_role", "decode-0", Role.PREFILL)),
    (("evacuate", "10.0.0.2", "--timeout", "9"), {"finished": {"decode-0": True}}, ("evacuate", "10.0.0.2", 9.0)),
    *(
        [(("adapters", "--unload", "law"), {"adapters": {"sql": "/sql"}}, ("adapters", {}, ["law"]))] if is_there("tandem.cluster.adapters") else []
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "answer", "done"), COMMANDS, ids=[words[0] for words, *_ in COMMANDS])
def test_an_operators_command_is_done_and_says_so(
    typed: Typed, control: RealActions, words: Sequence[str], answer: Any, done: Any
) -> None:
    told = typed(*words)
    assert {name: told[name] for name in answer} == answer
    assert control.cluster.asked[-1][: len(done)] == done


def test_a_drain_that_was_not_finished_has_failed(typed: Typed, control: RealActions) -> None:
    assert typed("drain", "decode-0", "--timeout", "5", status=1) == {"finished": {"decode-0": False}}
    assert control.cluster.asked[-1] == ("drain_node", "decode-0", 5.0)


def test_a_change_is_recorded_and_not_waited_for(typed: Typed, control: RealActions) -> None:
    told = typed("apply", "--no-wait", "--set", "slo.ttft_s=1")
    assert (told["change"]["revision"], told["done"]) == (3, True)
    (what, config, dry_run) = control.cluster.asked[-1]
    assert (what, dry_run) == ("apply", False)
    assert isinstance(config, TandemConfig)
    assert config.slo.ttft_s == 1


def test_log_lines_are_chosen_by_number_age_and_level(typed: Typed, control: RealActions) -> None:
    ask = ("logs", "decode", "--lines", "5")
    assert [line["message"] for line in typed(*ask, "--level", "info") if "message" in line] == ["serves"]
    (what, query) = control.cluster.asked[0]
    assert (what, query.names, query.last) == ("logs", ["decode"], 5)
    for chosen in (("--level", "error"), ("--since", "10s")):  # the line is information, of 1970
        assert not [line for line in typed(*ask, *chosen) if "message" in line]


def test_a_traced_request_is_shown_as_it_is_kept(router: RunningRouter, typed: Typed, tmp_path: Path) -> None:
    pytest.importorskip("tandem.cluster.trace")
    headers = {"x-request-id": "mine", "x-tandem-trace": "1"}
    assert router.complete(key="ops-key", headers=headers, max_tokens=3).status_code == 200
    assert [trace["request_id"] for trace in typed("trace")["traces"]] == ["mine"]
    assert typed("trace", "mine")["max_tokens"] == 3
    assert main(["trace", "mine", "--url", router.url, "--json", str(tmp_path / "mine.json")]) == 0
    assert json.loads((tmp_path / "mine.json").read_text())["finish_reasons"] == ["length"]
    assert typed("why", "mine")["request_id"] == "mine"
    assert "mine" in typed("top", "--every", "1")["latest"][-1]["request_id"]


def test_why_compares_with_costs_of_each_role(
    router: RunningRouter, typed: Typed, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    pytest.importorskip("tandem.simulator")
    from tests.simulator.worlds import node_costs

    (tmp_path / "node.json").write_bytes(msgspec.json.encode(node_costs()))
    assert router.complete(key="ops-key", headers={"x-request-id": "mine"}, max_tokens=3).status_code == 200
    files = ("--costs", "node.json", "--prefill-costs", "node.json", "--decode-costs", "node.json")
    assert typed("why", "mine", *files)["would_have_been"]["requests"] == 1
    assert typed("why", "mine", "--costs", "example")["would_have_been"]["requests"] == 1
    assert main(["why", "mine", "--url", router.url, *files[2:]]) == 1
    assert b"need --costs FILE" in capfdbinary.readouterr().err


@pytest.mark.skipif(not is_there("tandem.cluster.chat"), reason="the chat is not here")
def test_a_conversation_begins_as_its_flags_say(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/quit\n"))
    words = ["--system", "be brief", "--temperature", "0", "--max-tokens", "3"]
    assert main(["chat", "--url", router.url, *words]) == 0
    (asked,) = router.nodes["d0"].submits
    assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0, 3)
    text = router.server.services.model.tokenizer.decode(asked.prompt_token_ids, skip_special=False)
    assert "be brief" in text
