"""A response is found by its id at the deployment that made it."""

from __future__ import annotations

import pytest

from tandem.router.config import ApiKey
from tests.router.conftest import RunningRouter, StartRouter, error_of

pytest.importorskip("tandem.router.responses")


def test_a_response_is_found_by_its_id_at_whichever_deployment_made_it(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, code = two
    for model in ("fake", "code"):
        made = front.client.post("/v1/responses", json={"model": model, "input": "hi", "max_output_tokens": 3})
        response_id = made.json()["id"]
        found = front.client.get(f"/v1/responses/{response_id}")
        assert found.json() == made.json()
        assert front.client.delete(f"/v1/responses/{response_id}").json()["deleted"]
        assert front.client.get(f"/v1/responses/{response_id}").status_code == 404
    made = front.client.post(
        "/v1/responses", json={"model": "code", "input": "hi", "max_output_tokens": 3, "background": True}
    )
    path = f"/v1/responses/{made.json()['id']}"
    assert "response.incomplete" in front.client.get(path, params={"stream": "true"}).text
    assert front.client.post(f"{path}/cancel").json()["status"] == "incomplete"
    code.call(code.server.stop())
    assert "the routers of these models do not answer: fast-code" in error_of(front.client.get(path), 503)["message"]


def test_a_response_that_no_router_has_is_not_looked_for_for_ever(start_router: StartRouter) -> None:
    first = start_router(model_name="one")
    second = start_router(model_name="two", other_models={"one": first.url})
    third = start_router(model_name="three", other_models={"two": second.url})
    assert error_of(third.client.get(f"/v1/responses/resp_{'0' * 48}"), 404)["code"] == "response_not_found"


def test_a_router_that_does_not_know_the_key_has_no_response_of_it(start_router: StartRouter) -> None:
    code = start_router(model_name="code", api_keys=(ApiKey(name="b", key="secret-of-b"),))
    front = start_router(other_models={"code": code.url}, api_keys=(ApiKey(name="a", key="secret-of-a"),))
    headers = {"authorization": "Bearer secret-of-a"}
    answer = front.client.get(f"/v1/responses/resp_{'0' * 48}", headers=headers)
    assert error_of(answer, 404)["code"] == "response_not_found"
