"""Only operators may use /admin."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from tandem.base.errors import InvalidRequest, Unavailable
from tandem.router.config import ApiKey
from tests.router.conftest import RunningRouter, StartRouter, error_of

KEYS = (ApiKey("tenant", "tenant-key"), ApiKey("ops", "ops-key", operator=True))


class FakeControl:
    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []

    async def act(self, action: str, body: bytes) -> bytes:
        self.asked.append((action, body))
        if action == "refused":
            raise InvalidRequest("no such pool")
        if action == "away":
            raise Unavailable("the controller does not answer")
        return b'{"done": true}'


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    return keep_router(prefill=0, api_keys=KEYS)


@pytest.fixture
def router(kept_router: RunningRouter, control: FakeControl) -> RunningRouter:
    kept_router.server.services.control = control
    return kept_router


def ask(router: RunningRouter, key: str | None, action: str = "scale", body: bytes = b'{"x": 1}') -> httpx.Response:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return router.client.post(f"/admin/{action}", content=body, headers=headers)


def test_an_operator_is_let_through_with_what_it_sent(router: RunningRouter, control: FakeControl) -> None:
    answer = ask(router, "ops-key")
    assert (answer.status_code, answer.json()) == (200, {"done": True})
    assert control.asked == [("scale", b'{"x": 1}')]


def test_no_one_else_is(router: RunningRouter, control: FakeControl, start_router: StartRouter) -> None:
    for key, status in ((None, 401), ("wrong", 401), ("tenant-key", 403)):
        assert ask(router, key).status_code == status
    keyless = start_router(prefill=0)
    keyless.server.services.control = control
    assert "set one in router.api_keys" in error_of(ask(keyless, None), 403)["message"]
    assert control.asked == []


def test_what_the_cluster_says_is_the_answer(router: RunningRouter) -> None:
    for action, status in (("refused", 400), ("away", 503)):
        assert error_of(ask(router, "ops-key", action), status)["message"]
    assert router.client.get("/admin/view", headers={"authorization": "Bearer ops-key"}).status_code == 405
    router.server.services.control = None
    assert ask(router, "ops-key").status_code == 503


def test_a_body_is_bounded_and_must_be_json(router: RunningRouter, control: FakeControl) -> None:
    answer = router.client.post(
        "/admin/scale", content=b"x=1", headers={"authorization": "Bearer ops-key", "content-type": "text/plain"}
    )
    assert answer.status_code == 415
    assert ask(router, "ops-key", body=b"x" * (router.config.limits.body_bytes + 1)).status_code == 413
    assert control.asked == []


class AdapterControl(FakeControl):
    """A cluster with one adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = {"law": "/law"}

    async def act(self, action: str, body: bytes) -> bytes:
        asked = msgspec.json.decode(body or b"{}")
        if asked:
            self.asked.append((action, body))
        if "rank" in asked.get("load", {}):
            raise InvalidRequest("decode-0: it has rank 64")
        self.adapters |= asked.get("load", {})
        for name in asked.get("unload", ()):
            del self.adapters[name]
        return msgspec.json.encode({"adapters": self.adapters})


SQL, LAW = {"lora_name": "sql", "lora_path": "/sql"}, {"lora_name": "law", "lora_path": "/new"}


def test_adapters_come_and_go_as_vllms_clients_ask(router: RunningRouter) -> None:
    cases: list[tuple[str, Any, int, str]] = [
        ("load", SQL, 200, "'sql' added successfully"),
        ("load", {**LAW, "load_inplace": True}, 200, "'law' added"),
        ("load", LAW, 400, "is loaded already: set load_inplace"),
        ("load", {"lora_name": "law", "lora_path": "/law", "load_inplace": True}, 400, "another folder"),
        ("load", {"lora_name": "rank", "lora_path": "/rank"}, 400, "decode-0: it has rank 64"),
        ("load", {"lora_name": "sql"}, 400, "lora_path"),
        ("load", [], 400, "must be a mapping"),
        ("unload", {"lora_name": "law"}, 200, "'law' removed successfully"),
        ("unload", {"lora_name": "sql"}, 404, "there is no adapter 'sql'; there are: law"),
        ("unload", {}, 400, "lora_name"),
    ]
    for door, body, status, says in cases:
        control = router.server.services.control = AdapterControl()
        asked = f"/v1/{door}_lora_adapter"
        tenant = router.client.post(asked, json=body, headers={"authorization": "Bearer tenant-key"})
        assert tenant.status_code == 403
        answer = router.client.post(asked, json=body, headers={"authorization": "Bearer ops-key"})
        assert answer.status_code == status
        assert says in answer.text
        assert len(control.asked) == (status == 200 or "rank" in says)
