"""What `tandem verify` answers when it cannot compare. Its comparisons are in tests/integration/test_verify.py, with real servers."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest

from tandem.cluster.api_client import ApiClient
from tandem.cluster.cli import main
from tandem.cluster.verify import command
from tandem.cluster.verify.command import remake
from tandem.router.receipts.receipt import Receipt, marks_of, signed

RECEIPT = Receipt("0.2", "/v1/completions", "c", "", "p", {"seed": 7}, marks_of([1, 2], None, "stop"))
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", NOWHERE], "--url must be given twice, for the two servers to compare, not 1 times"),
        (["--url", NOWHERE, "--url", NOWHERE, "-o", "json"], "http://127.0.0.1:9 does not answer"),
        (["--url", NOWHERE, "--url", NOWHERE, "--at-once", "0"], "--at-once must be from 1 to 256, not 0"),
        (["--url", NOWHERE, "--url", NOWHERE, "--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["--url", NOWHERE, "--url", NOWHERE, "--timeout", "0"], "--timeout must be from 0 to 1e+06 seconds"),
        (["--url", NOWHERE, "--request", "b"], "--request needs a receipt and one server"),
        (["r", "--url", NOWHERE, "--request", "b"], "r cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_compared_ends_with_2_and_says_why(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_full_disk_is_not_taken_for_other_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["verify", "--url", NOWHERE, "--url", NOWHERE, "-o", "json"]) == 2
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(("body", "seed"), [({"prompt": "a"}, 7), ({"prompt": "a", "seed": None}, 7), ({"seed": 3}, 3)])
def test_an_answer_is_made_again_with_the_seed_that_the_router_drew(
    body: dict[str, object], seed: int, tmp_path: Path
) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, headers={"x-tandem-receipt": signed(RECEIPT, b"k" * 32)}, json={})

    receipt, request = tmp_path / "receipt", tmp_path / "request.json"
    receipt.write_text(signed(RECEIPT, b"k" * 32))
    request.write_text(json.dumps(body))
    server = ApiClient("http://router", None, httpx.MockTransport(answer))
    assert remake(server, receipt, request, 1.0).same
    assert json.loads(asked[0].content)["seed"] == seed


@pytest.mark.parametrize("text", ["hello", "[]", "{}"])
def test_a_server_that_answers_with_something_else_was_not_compared(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def client(url: str, key: str | None) -> ApiClient:
        return ApiClient(url, key, httpx.MockTransport(lambda request: httpx.Response(200, text=text)))

    monkeypatch.setattr(command, "ApiClient", client)
    assert main(["verify", "--url", NOWHERE, "--url", NOWHERE]) == 2
    assert "does not list its models as a Tandem server does" in capsys.readouterr().err


def test_ctrl_c_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, answered = threading.Event(), []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"max_model_len": 100}]})
        if request.url.host == "interrupted":
            raise KeyboardInterrupt
        ended.wait(20.0)
        answered.append(request)
        return httpx.Response(200, json={})

    def client(url: str, key: str | None) -> ApiClient:
        return ApiClient(url, key, httpx.MockTransport(answer))

    monkeypatch.setattr(command, "ApiClient", client)
    assert main(["verify", "--url", "http://slow", "--url", "http://interrupted"]) == 130
    assert not answered
    ended.set()
