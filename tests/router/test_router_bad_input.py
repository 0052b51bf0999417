from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tandem.router.config import UnknownFields
from tests.router.bad_inputs import CHAT, COMPLETIONS, VALID, all_bad
from tests.router.conftest import RunningRouter, bombarded

BAD = list(all_bad())


@pytest.fixture(scope="module")
def router(model_folder: str, end_token: int) -> Iterator[RunningRouter]:
    with bombarded(model_folder, end_token, UnknownFields.REFUSE) as running:
        yield running


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_the_table_changes_is_valid_without_the_change(router: RunningRouter, path: str) -> None:
    assert router.client.post(path, json=VALID[path]).status_code == 200


@pytest.mark.parametrize("path", sorted({bad.path for bad in BAD}))
def test_is_refused_by_name(router: RunningRouter, path: str) -> None:
    for bad in BAD:
        if bad.path != path:
            continue
        answer = router.client.post(
            bad.path, content=json.dumps(bad.body), headers={"content-type": "application/json"}
        )
        assert answer.status_code == bad.status, (bad.name, answer.text)
        error = error_of(answer)
        assert error["type"] == "invalid_request_error", bad.name
        assert error["param"] is not None, bad.name
        assert error["param"].startswith(bad.param), (bad.name, error)
        assert bad.param in error["message"] or bad.status == 404, (bad.name, error)
        assert bad.code in (None, error["code"]), bad.name
        assert router.server.services.dispatcher.running == 0, bad.name


def test_a_refusal_is_short_however_long_the_mistake_is(router: RunningRouter) -> None:
    answer = router.client.post(COMPLETIONS, json=VALID[COMPLETIONS] | {"x" * 1_000_000: 1})
    assert answer.status_code == 400
    message = error_of(answer)["message"]
    assert "unknown" in message
    assert len(answer.content) < 10_000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions/", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/../etc/passwd", 404),
        ("GET", "/%00%ff", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("PATCH", "/metrics", 405),
        ("OPTIONS", "/cluster", 405),
    ],
)
def test_unknown_paths_and_methods(router: RunningRouter, method: str, path: str, status: int) -> None:
    answer = router.client.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["code"] in ("not_found", "method_not_allowed", "model_not_found")
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonx",
        "",
        "application/json; charset=latin-1",
    ],
)
def test_another_content_type(router: RunningRouter, content_type: str) -> None:
    answer = router.client.post(COMPLETIONS, content=b"{}", headers={"content-type": content_type})
    assert answer.status_code == 415
    assert error_of(answer)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_the_right_content_type_in_any_spelling(router: RunningRouter, content_type: str) -> None:
    body = json.dumps(VALID[COMPLETIONS]).encode()
    assert router.client.post(COMPLETIONS, content=body, headers={"content-type": content_type}).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "seed": None, "stop": None, "logit_bias": None, "n": None, "temperature": None, "top_p": None},
        {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
        {"reasoning_effort": "low", "verbosity": "high", "prediction": {"type": "content", "content": "x"}},
        {"stream_options": None, "presence_penalty": None, "max_tokens": None, "temperature": 1, "top_p": 1},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_openai_defines_and_null_are_accepted(router: RunningRouter, path: str, fields: dict[str, Any]) -> None:
    assert router.client.post(path, json=VALID[path] | fields).status_code == 200


def test_what_other_servers_put_into_their_answers_may_be_sent_back(router: RunningRouter) -> None:
    message = {
        "role": "assistant", "content": "hello", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None, "reasoning_content": None, "x_vendor": 1,
    }  # fmt: skip
    body = VALID[CHAT] | {"messages": [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "and?"}]}
    assert router.client.post(CHAT, json=body).status_code == 200
