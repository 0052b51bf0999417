"""`tandem batch` as a user types it, against a router with fake nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.base.errors import ConfigurationError, InternalError
from tandem.cluster.api_client import ApiClient
from tandem.cluster.batches import command, job
from tandem.cluster.cli import main
from tests.router.conftest import RunningRouter, StartRouter


def line(custom_id: str, prompt: str = "the fox", **fields: Any) -> str:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 4, "seed": 1, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture
def router(start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningRouter:
    monkeypatch.setattr(job, "LOOK_S", 0.05)
    return start_router(batches_folder=str(tmp_path / "store"))


def test_it_writes_the_answers_in_the_order_of_the_requests(
    router: RunningRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n".join(line(f"n{index}", f"number {index}") for index in range(40)))
    assert main(["batch", str(given), str(out), "--url", router.url]) == 0
    assert "40 of 40" in capsys.readouterr().out
    answers = [json.loads(each) for each in out.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == [f"n{index}" for index in range(40)]
    text = answers[7]["response"]["body"]["choices"][0]["text"]
    assert text == router.expected("number 7", 4, seed=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "store"]
    assert router.client.get("/v1/files").json()["data"] == []

    given.write_text("\n".join([line("good"), line("bad", max_tokens=-1)]))
    assert main(["batch", str(given), str(out), "--url", router.url, "-o", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["completed"], told["failed"]) == (1, 1)
    assert json.loads((tmp_path / "out.errors.jsonl").read_text())["custom_id"] == "bad"


def test_called_again_it_goes_on(
    router: RunningRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call is interrupted. The job goes on at the server, and the second call fetches its answers."""
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n".join(line(f"n{index}") for index in range(5)))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job.BatchClient, "follow", interrupted)
        assert main(["batch", str(given), str(out), "--url", router.url]) == 130
    assert "call again" in capsys.readouterr().err
    assert not out.exists()
    assert main(["batch", str(given), str(out), "--url", router.url]) == 0
    assert len(out.read_text().splitlines()) == 5
    assert len(router.client.get("/v1/batches").json()["data"]) == 1, "no second job was begun"
    assert len(router.nodes["p0"].submits) == 5, "no request was answered twice"


def test_what_is_wrong_is_named(router: RunningRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out, folder = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "folder"
    folder.mkdir()
    url = ["--url", router.url]
    given.write_text(line("a"))
    for arguments, named in (
        ([str(tmp_path / "none"), str(out)], "is no file"),
        ([str(given), str(tmp_path / "no" / "out")], "there is no folder"),
        ([str(given), str(out), *url, "--model", "smollm2"], "leave one of them out"),
        ([str(given), str(out), *url, "--window", "soon"], "24h"),
        ([str(given), str(folder), *url], "cannot be written"),
        ([str(given), str(given), *url], "is the file of the requests"),
    ):
        assert main(["batch", *arguments]) == 1
        assert named in capsys.readouterr().err.replace("\n", " ")
    assert router.client.get("/v1/batches").json()["data"] == []
    assert given.read_text() == line("a")
    given.write_text("\n".join([line("a"), line("a")]))
    assert main(["batch", str(given), str(out), *url]) == 1
    assert "line 2: custom_id" in capsys.readouterr().err
    assert router.client.get("/v1/files").json()["data"] == [], "what was refused does not stay at the server"


@pytest.mark.parametrize("body", [b"<html>It works</html>", b"{}", b"[]"])
def test_a_server_of_another_kind_is_one_sentence(body: bytes, tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text(line("a"))
    api = ApiClient("http://server", None, httpx.MockTransport(lambda request: httpx.Response(200, content=body)))
    client = job.BatchClient(api)
    for ask in (lambda: client.begin(given, "/v1/completions", "24h"), lambda: client.look("batch_1")):
        with pytest.raises(InternalError, match="did not answer like a Tandem router"):
            ask()


def test_a_job_that_no_later_call_would_find_is_cancelled(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text("\n".join(line(f"n{index}") for index in range(50)))

    def full(*_: object) -> None:
        raise ConfigurationError("No space left on device")

    monkeypatch.setattr(command, "write_note", full)
    assert main(["batch", str(given), str(tmp_path / "out.jsonl"), "--url", router.url]) == 1
    (job,) = router.client.get("/v1/batches").json()["data"]
    assert job["status"] in ("cancelling", "cancelled")
