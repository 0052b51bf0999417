"""OpenAI's files and batches, by its own client, on a router with fake nodes."""

from __future__ import annotations

import gc
import json
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tandem.router.batches import runner, store, store_thread, uploads
from tandem.router.batches.database import StoreFolder, transaction
from tandem.router.batches.line_exchange import LineConnection
from tandem.router.batches.store import BatchStore
from tandem.router.batches.wing import Batches
from tandem.router.config import ApiKey, Limits
from tandem.wire.nodes import Role
from tandem.wire.pooling import Pooling, PoolingKind, VectorModel
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.waiting import until

CHAT = "/v1/chat/completions"


def line(custom_id: str, prompt: str = "the fox", url: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 4, "seed": 1, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def put(router: RunningRouter, content: bytes, key: str = "", **fields: str) -> httpx.Response:
    return router.client.post(
        "/v1/files",
        files={"file": ("in.jsonl", content)},
        data={"purpose": "batch", **fields},
        headers={"authorization": f"Bearer {key}"} if key else {},
    )


def begin(router: RunningRouter, content: bytes, **fields: Any) -> dict[str, Any]:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
    made = router.client.post("/v1/batches", json={"input_file_id": put(router, content).json()["id"], **asked})
    assert made.status_code == 200, made.text
    found: dict[str, Any] = made.json()
    return found


def look(router: RunningRouter, batch: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = router.client.get(f"/v1/batches/{batch['id']}").json()
    return found


def ended(router: RunningRouter, batch: dict[str, Any]) -> dict[str, Any]:
    until(lambda: look(router, batch)["status"] in ("completed", "failed", "expired", "cancelled"))
    return look(router, batch)


def lines_of(router: RunningRouter, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in router.client.get(f"/v1/files/{file_id}/content").text.splitlines()]


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["response"]["body"]["choices"][0]["text"]
    return text


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TURN_S", 0.1)


@pytest.fixture
def router(start_router: StartRouter, tmp_path: Path) -> RunningRouter:
    return start_router(batches_folder=str(tmp_path / "batches"))


def test_openais_client_has_a_file_of_requests_answered(router: RunningRouter, tmp_path: Path) -> None:
    client = router.official_client()
    given = tmp_path / "in.jsonl"
    good = [line(f"n{index}", f"number {index}", seed=index) for index in range(runner.GROUP + 8)]
    given.write_bytes(jsonl([*good, line("bad", max_tokens=-1), line("streamed", stream=True)]))
    with given.open("rb") as content:
        file = client.files.create(file=content, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "tests"}
    )
    assert batch.status == "validating"
    until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (len(good) + 2, len(good), 2)
    assert batch.metadata == {"of": "tests"}
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    texts = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    assert [(each["custom_id"], text_of(each)) for each in texts] == [
        (f"n{index}", router.expected(f"number {index}", 4, seed=index)) for index in range(len(good))
    ]
    errors = lines_of(router, batch.error_file_id)
    assert [each["response"]["status_code"] for each in errors] == [400, 400]
    assert "max_tokens" in errors[0]["response"]["body"]["error"]["message"]
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert {each.id for each in client.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
    assert [each.id for each in client.files.list(purpose="batch")] == [file.id]
    assert client.files.retrieve(file.id).filename == "in.jsonl"
    assert client.files.delete(file.id).deleted
    assert router.client.get(f"/v1/files/{file.id}").status_code == 404
    assert router.client.get(f"/v1/files/{batch.output_file_id}").json()["purpose"] == "batch_output"
    answered = f'tandem_batch_lines_total{{model_name="fake",outcome="answered"}} {len(good)}.0'
    assert answered in router.client.get("/metrics").text
    router.wait_for(router.idle, "nothing is left behind")


def test_chats_and_vectors_are_answered_too(start_router: StartRouter, tmp_path: Path) -> None:
    router = start_router(vectors=VectorModel(Pooling(PoolingKind.MEAN), 8), batches_folder=str(tmp_path))
    for url, body, kind in (
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, "chat.completion"),
        ("/v1/embeddings", {"input": "hi"}, "list"),
    ):
        asked = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "fake", **body}}
        batch = ended(router, begin(router, jsonl([asked]), endpoint=url))
        (answer,) = lines_of(router, batch["output_file_id"])
        assert answer["response"]["body"]["object"] == kind
    assert all(submit.when_idle for node in router.nodes.values() for submit in node.submits)


def test_a_file_that_is_no_batch_fails_with_its_lines_named(router: RunningRouter) -> None:
    for content, code, where in (
        (jsonl([line("a"), line("a")]), "duplicate_custom_id", 2),
        (b'{"custom_id": "a"}\n', "invalid_request", 1),
        (jsonl([line("a")]) + b"\nno json\n", "invalid_json_line", 2),
        (jsonl([line("a", url=CHAT)]), "mismatched_url", 1),
        (jsonl([line("a", x=0)]).replace(b"0}", b"[" * 300 + b"]" * 300 + b"}"), "invalid_json_line", 1),
        (jsonl([line("a", x=0)]).replace(b"0}", b"[" * 5000 + b"]" * 5000 + b"}"), "invalid_json_line", 1),
        (b"\n \n", "empty_file", None),
    ):
        batch = ended(router, begin(router, content))
        assert batch["status"] == "failed"
        (mistake,) = batch["errors"]["data"]
        assert (mistake["code"], mistake["line"]) == (code, where)


def test_what_is_asked_wrongly_is_refused_by_name(router: RunningRouter) -> None:
    post, file_id = router.client.post, put(router, jsonl([line("a")])).json()["id"]
    for fields, named in (
        ({"endpoint": "/v1/nothing"}, "/v1/embeddings"),
        ({"completion_window": "soon"}, "24h"),
        ({"metadata": {"a": "b" * 600}}, "512"),
        ({"input_file_id": "file-none"}, "file-none"),
    ):
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
        answer = post("/v1/batches", json=asked)
        assert answer.status_code in (400, 404)
        assert named in answer.json()["error"]["message"]
    assert put(router, b"").status_code == 400
    assert put(router, b"{}", purpose="mischief").json()["error"]["param"] == "purpose"
    assert post("/v1/files", json={}).json()["error"]["message"].startswith("content-type")
    for limit in ("0", "\N{SUPERSCRIPT TWO}", "many"):
        assert router.client.get(f"/v1/files?limit={limit}").json()["error"]["param"] == "limit"
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "\N{SUPERSCRIPT TWO}"}
    assert put(router, b"{}", **expiry).json()["error"]["param"] == "expires_after"
    assert router.client.get("/v1/batches/batch_none").status_code == 404


def test_one_key_never_sees_anothers(start_router: StartRouter, tmp_path: Path) -> None:
    keys = (ApiKey("anna", "key-a", requests_per_minute=3), ApiKey("bert", "key-b"))
    router = start_router(api_keys=keys, batches_folder=str(tmp_path))
    anna, bert = ({"authorization": f"Bearer key-{each}"} for each in "ab")
    file_id = put(router, jsonl([line(f"n{index}") for index in range(9)]), key="key-a").json()["id"]
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions"}
    assert router.client.post("/v1/batches", json=asked, headers=bert).status_code == 404
    batch_id = router.client.post("/v1/batches", json=asked, headers=anna).json()["id"]
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
        assert router.client.get(path, headers=bert).status_code == 404
    assert router.client.delete(f"/v1/files/{file_id}", headers=bert).status_code == 404
    assert router.client.post(f"/v1/batches/{batch_id}/cancel", headers=bert).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert router.client.get(path, headers=bert).json()["data"] == []

    def done() -> bool:
        found = router.client.get(f"/v1/batches/{batch_id}", headers=anna).json()
        return bool(found["status"] == "completed" and found["request_counts"]["completed"] == 9)

    until(done, 15)  # nine lines, though the key has three requests a minute: batches use no quota
    salts = {submit.cache_salt for submit in router.nodes["p0"].submits}
    assert len(salts) == 1
    assert None not in salts


def test_a_cancelled_batch_keeps_what_it_has(router: RunningRouter) -> None:
    batch = begin(router, jsonl([line("quick", max_tokens=2), *(line(f"n{i}", max_tokens=9) for i in range(5))]))
    router.set(pause_at=4)
    until(lambda: look(router, batch)["request_counts"]["completed"] == 1)
    busy = router.client.delete(f"/v1/files/{batch['input_file_id']}")
    assert batch["id"] in busy.json()["error"]["message"]
    assert router.client.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    batch = ended(router, batch)
    assert (batch["status"], batch["error_file_id"]) == ("cancelled", None)
    assert [each["custom_id"] for each in lines_of(router, batch["output_file_id"])] == ["quick"]
    router.wait_for(router.idle, "its lines have left the nodes")
    assert router.client.post(f"/v1/batches/{batch['id']}/cancel").status_code == 400


def test_lines_that_are_not_answered_in_time_are_named(router: RunningRouter) -> None:
    router.set(pause_at=0)
    batch = ended(router, begin(router, jsonl([line("a"), line("b")]), completion_window="2s"))
    assert (batch["status"], batch["output_file_id"]) == ("expired", None)
    errors = [(each["custom_id"], each["error"]["code"]) for each in lines_of(router, batch["error_file_id"])]
    assert errors == [("a", "batch_expired"), ("b", "batch_expired")]
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}


def test_a_batch_survives_the_death_of_its_router(
    start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two router processes with one store. The first dies while its lines are under way: the second answers them, and each
    line is in the output once, in the file's order."""
    monkeypatch.setattr("tandem.router.batches.store.LEASE_S", 1.0)
    monkeypatch.setattr("tandem.router.batches.runner.LEASE_S", 1.0)
    first = start_router(batches_folder=str(tmp_path))
    first.nodes["p0"].set(pause_at=0)
    batch = begin(first, jsonl([line(f"n{index}", f"number {index}") for index in range(80)]))
    first.nodes["p0"].wait_until(lambda: len(first.nodes["p0"].submits) >= 20, "lines are under way")
    second = start_router(prefill=0, decode=0, batches_folder=str(tmp_path))
    first.freeze()
    try:
        second.add("p1", Role.PREFILL)
        second.add("d1", Role.DECODE)
        done = ended(second, batch)
    finally:
        first.go_on()
    assert done["request_counts"] == {"total": 80, "completed": 80, "failed": 0}
    assert [(each["custom_id"], text_of(each)) for each in lines_of(second, done["output_file_id"])] == [
        (f"n{index}", second.expected(f"number {index}", 4, seed=1)) for index in range(80)
    ]


def test_several_routers_answer_each_line_once(start_router: StartRouter, tmp_path: Path) -> None:
    routers = [start_router(batches_folder=str(tmp_path), limits=Limits(inflight_per_node=40)) for _ in range(2)]
    nodes = [router.nodes["p0"] for router in routers]
    for node in nodes:
        node.set(pause_at=0)
    batch = begin(routers[0], jsonl([line(f"n{index}", f"number {index}") for index in range(60)]))
    for node in nodes:
        node.wait_until(lambda node=node: len(node.submits) > 5, "both work")  # type: ignore[misc]
    for node in nodes:
        node.resume()
    assert ended(routers[1], batch)["request_counts"]["completed"] == 60
    submitted = [len(node.submits) for node in nodes]
    assert (sum(submitted), min(submitted) > 5) == (60, True)


def test_a_router_that_restarts_goes_on(start_router: StartRouter, tmp_path: Path) -> None:
    first = start_router(batches_folder=str(tmp_path))
    first.nodes["p0"].set(pause_at=0)
    batch = begin(first, jsonl([line(f"n{index}") for index in range(40)]))
    first.nodes["p0"].wait_until(lambda: bool(first.nodes["p0"].submits), "lines are under way")
    first.call(first.server.drain(5))  # does not wait for the lines: a successor answers them
    second = start_router(batches_folder=str(tmp_path))
    assert ended(second, batch)["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


def test_interactive_requests_take_the_places_of_lines(start_router: StartRouter, tmp_path: Path) -> None:
    """One node with four places: lines have at most two, rest when a request needs one, and go on from their tokens."""
    router = start_router(batches_folder=str(tmp_path), limits=Limits(inflight_per_node=4))
    router.set(pause_at=3)
    batch = begin(router, jsonl([line(f"n{index}", f"number {index}", max_tokens=8) for index in range(4)]))
    admission = router.server.services.dispatcher.admission
    router.wait_for(lambda: admission.idle_work.held == 2, "two lines run")
    streams = [router.stream(max_tokens=8, seed=seed) for seed in range(4)]
    for stream in streams:
        assert len(stream.text(2)) > 0
    assert router.look(lambda: (admission.held, admission.idle_work.held)) == (4, 0)
    router.set(pause_at=None)
    done = ended(router, batch)
    assert done["request_counts"]["completed"] == 4
    for index, each in enumerate(lines_of(router, done["output_file_id"])):
        assert text_of(each) == router.expected(f"number {index}", 8, seed=1)
    assert router.metric("tandem_sequences_paused_total") == 2
    for stream in streams:
        stream.close()


def test_lines_together_leave_others_half_of_the_routers_memory(start_router: StartRouter, tmp_path: Path) -> None:
    router = start_router(batches_folder=str(tmp_path), limits=Limits(kept_bytes=220_000))
    router.set(pause_at=1)
    batch = begin(router, jsonl([line(f"n{index}", n=10) for index in range(4)]))
    news, kept = router.wing(Batches).runner._news, router.server.services.kept
    router.wait_for(lambda: kept.held > 80_000 and not news.is_set(), "as many run as may")
    assert router.look(lambda: kept.held) < 110_000
    assert not [each for each in gc.get_objects() if type(each) is LineConnection and each.whole_body()]
    router.set(pause_at=None)
    assert ended(router, batch)["request_counts"]["completed"] == 4


def test_a_line_whose_node_is_lost_is_answered_all_the_same(router: RunningRouter) -> None:
    router.nodes["d0"].set(pause_at=2)
    batch = begin(router, jsonl([line("a", max_tokens=6)]))
    router.nodes["d0"].wait_until(lambda: bool(router.nodes["d0"].submits), "it runs")
    router.remove("d0").kill()
    router.add("d1", Role.DECODE)
    (answer,) = lines_of(router, ended(router, batch)["output_file_id"])
    assert text_of(answer) == router.expected("the fox", 6, seed=1)


def test_a_full_disk_is_said_and_leaves_nothing(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = Path.open

    def on_a_full_disk(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        file = opens(path, mode, *given, **named)
        return opens(Path("/dev/full"), "wb") if mode == "xb" else file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", on_a_full_disk)
        refused = put(router, jsonl([line("a")]))
    assert error_of(refused, 507)["code"] == "insufficient_storage"
    until(lambda: not list((tmp_path / "batches" / "files").iterdir()))
    assert ended(router, begin(router, jsonl([line("a")])))["status"] == "completed"


def test_a_disk_that_hangs_keeps_only_who_needs_it_waiting(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_again, threads, opens = threading.Event(), set[str](), Path.open

    def hangs(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if mode == "xb":
            threads.add(threading.current_thread().name)
            answers_again.wait(20)
        return opens(path, mode, *given, **named)

    monkeypatch.setattr(store_thread, "ANSWER_S", 0.2)
    monkeypatch.setattr(Path, "open", hangs)
    monkeypatch.setattr(runner, "STOP_S", 0.2)
    try:
        for _ in range(3):
            assert error_of(put(router, jsonl([line("a")])), 503)["code"] == "batch_store_unavailable"
        # One that is tokenized by the threads that all requests share.
        assert router.complete(prompt="the fox " * 400, max_tokens=2).status_code == 200
        assert {name.partition("_")[0] for name in threads} == {"batches"}
        router.call(router.wing(Batches).ending())
    finally:
        answers_again.set()


def test_the_event_loop_never_asks_the_file_system(
    start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists, asked = Path.exists, list[str]()

    def noted(path: Path) -> bool:
        if path.name == "batches.sqlite":
            asked.append(threading.current_thread().name.partition("_")[0])
        return exists(path)

    monkeypatch.setattr(Path, "exists", noted)
    start_router(batches_folder=str(tmp_path / "none"))
    until(lambda: len(asked) > 3)
    assert set(asked) == {"batches"}


def test_a_file_too_large_is_cut_off(router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_FILE_BYTES", 100_000)
    assert put(router, b"x" * 300_000).status_code == 413
    assert put(router, b"x" * 120_000).status_code == 413
    until(lambda: not list((tmp_path / "batches" / "files").iterdir()))
    content = bytes(range(256)) * 300
    kept = put(router, content).json()
    assert router.client.get(f"/v1/files/{kept['id']}/content").content == content


def test_files_go_when_their_time_is_over(tmp_path: Path) -> None:
    now = [1000.0]
    store = BatchStore(tmp_path, clock=lambda: now[0])
    file_id, path = store.files.new_path()
    path.write_bytes(b"x")
    store.files.add(file_id, "", "a", "batch", 1, expires=2000)
    assert store.files.forget_expired() == 0
    now[0] = 2001.0
    assert store.files.forget_expired() == 1
    assert not path.exists()
    store.close()


def test_a_batch_whose_file_was_taken_away_fails_and_says_so(router: RunningRouter, tmp_path: Path) -> None:
    file = put(router, jsonl([line("a")])).json()["id"]
    (tmp_path / "batches/files" / file).unlink()
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = ended(router, router.client.post("/v1/batches", json=asked).json())
    assert batch["status"] == "failed"
    assert [each["code"] for each in batch["errors"]["data"]] == ["input_file_lost"]


def test_a_batch_that_cannot_be_read_stops_no_other(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "AFTER_FAILURE_S", 0.1)
    file = put(router, jsonl([line("a")])).json()["id"]
    path = tmp_path / "batches/files" / file
    path.unlink()
    path.mkdir()  # it is there and cannot be read
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    stuck = router.client.post("/v1/batches", json=asked).json()
    assert ended(router, begin(router, jsonl([line("a")])))["status"] == "completed"
    assert look(router, stuck)["status"] == "validating"


def test_lines_that_cannot_be_read_for_a_while_are_answered_later(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "AFTER_FAILURE_S", 0.1)
    node = router.nodes["d0"]
    node.set(pause_at=1)
    batch = begin(router, jsonl([line(f"{index}") for index in range(200)]))
    until(lambda: look(router, batch)["status"] == "in_progress" and len(node.submits) > 0)
    (file,) = (tmp_path / "batches/files").iterdir()
    away = file.rename(tmp_path / "away")
    file.mkdir()  # it is there and cannot be read
    node.resume()
    until(lambda: "cannot be used" in caplog.text)
    assert ended(router, begin(router, jsonl([line("a")])))["status"] == "completed", (
        "another batch does not wait for it"
    )
    file.rmdir()
    away.rename(file)
    assert ended(router, batch)["request_counts"] == {"total": 200, "completed": 200, "failed": 0}


def test_where_no_batch_was_ever_asked_for_nothing_is_written(start_router: StartRouter, tmp_path: Path) -> None:
    router = start_router(batches_folder=str(tmp_path / "none"))
    assert router.complete(max_tokens=2).status_code == 200
    assert router.wing(Batches).thread.store.place.exists is False
    assert not (tmp_path / "none").exists()


def test_batches_of_messages_are_asked_for_over_http(router: RunningRouter) -> None:
    http, path = router.client, "/v1/messages/batches"
    asked = {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    three: list[dict[str, Any]] = [
        {"custom_id": f"n{at}", "params": {"model": model, **asked}}
        for at, model in enumerate(("fake", "fake", "none"))
    ]
    refused = router.ask(path, requests=three[:1] * 2)
    assert refused.json()["error"]["message"].startswith("requests[1].custom_id")

    def end(made: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
        """The batch as it has ended, and what became of each of its requests."""
        one = f"{path}/{made['id']}"
        until(lambda: http.get(one).json()["processing_status"] == "ended")
        results = [json.loads(each) for each in http.get(f"{one}/results").text.splitlines()]
        return http.get(one).json(), [(each["custom_id"], each["result"]) for each in results]

    made = router.ask(path, requests=three).json()
    assert (made["processing_status"], made["request_counts"]["processing"]) == ("in_progress", 3)
    whole, results = end(made)
    counts = whole["request_counts"]
    assert (counts["succeeded"], counts["errored"], counts["processing"]) == (2, 1, 0)
    kinds = [(name, result["type"]) for name, result in results]
    assert kinds == [("n0", "succeeded"), ("n1", "succeeded"), ("n2", "errored")]
    assert results[2][1]["error"]["error"]["type"] == "not_found_error"
    one = f"{path}/{made['id']}"
    assert http.post(f"{one}/cancel").status_code == 400, "it has ended"
    assert [each["id"] for each in http.get(path).json()["data"]] == [made["id"]]
    assert http.get("/v1/batches").json()["data"] == []
    assert http.get(f"{path}?before_id={made['id']}").status_code == 400
    assert http.delete(one).json()["type"] == "message_batch_deleted"
    assert http.get(one).json()["error"]["type"] == "not_found_error"
    router.set(pause_at=0)
    late = router.ask(path, requests=three[:2]).json()
    until(lambda: bool(router.nodes["p0"].running))
    assert http.post(f"{path}/{late['id']}/cancel").json()["processing_status"] == "canceling"
    assert [(name, result["type"]) for name, result in end(late)[1]] == [("n0", "canceled"), ("n1", "canceled")]


@pytest.mark.more
def test_anthropics_client_has_messages_answered(router: RunningRouter) -> None:
    import anthropic  # takes seconds

    client = anthropic.Anthropic(base_url=router.url, api_key="unused", max_retries=0)
    params: Any = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    batch = client.messages.batches.create(requests=[{"custom_id": "a", "params": params}])
    until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    assert [each.result.type for each in client.messages.batches.results(batch.id)] == ["succeeded"]
    assert [each.id for each in client.messages.batches.list()] == [batch.id]
    client.messages.batches.cancel(client.messages.batches.create(requests=[{"custom_id": "a", "params": params}]).id)
    assert client.messages.batches.delete(batch.id).id == batch.id


@pytest.mark.parametrize(
    ("module", "limit", "most", "status"), [(store, "MOST_UNFINISHED", 0, 503), (uploads, "SPARE_BYTES", 1 << 62, 507)]
)
def test_messages_that_there_is_no_room_for_leave_no_file(
    router: RunningRouter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    limit: str,
    most: int,
    status: int,
) -> None:
    monkeypatch.setattr(module, limit, most)
    params = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    refused = router.client.post("/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]})
    assert refused.status_code == status, refused.text
    assert router.client.get("/v1/files").json()["data"] == []
    assert not list((tmp_path / "batches/files").iterdir())


def test_a_store_that_could_not_be_opened_is_opened_again(tmp_path: Path) -> None:
    place = StoreFolder(tmp_path)
    (tmp_path / "batches.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        assert place.database
    assert not place.is_open
    (tmp_path / "batches.sqlite").unlink()
    assert place.database.execute("SELECT count(*) FROM jobs").fetchone()[0] == 0
    place.close()


def test_only_the_routers_user_reads_the_store_in_whatever_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made before"
    folder.mkdir(mode=0o755)
    place = StoreFolder(folder)
    with transaction(place.database) as database:
        database.execute("INSERT INTO workers VALUES ('one', 1.0)")
    beside = {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir()}
    assert {"batches.sqlite", "batches.sqlite-wal", "files"} <= beside.keys()
    assert not any(beside.values()), beside
    place.close()
