"""Paths under other servers' names, and what is said where there is nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.router.http.api_document import examples
from tandem.wire.nodes import Role
from tandem.wire.pooling import Pooling, PoolingKind, VectorModel
from tests.router.conftest import RunningRouter, StartRouter, bombarded, error_of
from tests.router.fake_node import VECTOR_SIZE
from tests.router.test_router_admin import KEYS, FakeControl


@pytest.fixture(scope="module")
def router(model_folder: str, end_token: int) -> Iterator[RunningRouter]:
    vectors = VectorModel(Pooling(PoolingKind.MEAN), VECTOR_SIZE)
    with bombarded(model_folder, end_token, vectors=vectors) as running:
        yield running


def test_where_there_is_nothing_the_answer_says_what_there_is(router: RunningRouter) -> None:
    for path, said in (
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("//v1/completions", "did you mean /v1/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/embedding", "did you mean /v1/embeddings?"),
        ("/models", "did you mean /v1/models?"),
        ("/generate", "/v1/completions"),
        ("/pooling", "/v1/embeddings"),
        ("/classify", "no classification"),
        ("/server_info", "/cluster"),
        ("/v1/chat/completions/batch", "/v1/batches"),
        ("/sleep", "/admin/pause"),
    ):
        answer = router.client.post(router.url + path, json={})
        assert error_of(answer, 404)["code"] == "not_found"
        assert said in answer.json()["error"]["message"]
    like_no_other = router.client.get("/nowhere").json()["error"]["message"]
    assert like_no_other == "there is nothing at /nowhere"


def test_a_browser_is_sent_to_the_page_and_a_program_told_the_places(router: RunningRouter) -> None:
    shown = router.client.get("/", headers={"accept": "text/html,*/*"})
    assert (shown.status_code, shown.headers["location"]) == (307, "/ui")
    places = router.client.get("/", headers={"accept": "application/json"}).json()
    assert router.client.get(places["document"]).status_code == 200
    assert router.client.get(places["page"]).status_code == 200


def test_a_router_without_nodes_lives_and_is_not_healthy(start_router: StartRouter) -> None:
    alone = start_router(prefill=0, decode=0, api_keys=KEYS)
    assert alone.client.get("/live").json() == {"status": "ok"}
    assert alone.client.get("/healthz").status_code == alone.client.get("/health").status_code == 503
    alone.add("a0", Role.AGGREGATED)
    alone.wait_ready()
    assert alone.client.get("/healthz").json() == {"status": "ok"}


def test_a_model_tells_its_name_to_sglangs_clients(router: RunningRouter) -> None:
    told = router.client.get("/get_model_info").json()
    assert told == {"model_path": "fake", "tokenizer_path": "fake", "is_generation": True, "max_model_len": 2048}
    assert "<|start|>" in router.client.get("/tokenizer_info").json()["chat_template"]


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_an_operator_empties_the_caches_under_every_name(start_router: StartRouter, path: str) -> None:
    router, control = start_router(prefill=0, api_keys=KEYS), FakeControl()
    router.server.services.control = control
    for key, status in ((None, 401), ("tenant-key", 403), ("ops-key", 200)):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        assert router.client.post(path, headers=headers).status_code == status
        assert router.client.get("/tokenizer_info", headers=headers).status_code == status
    assert [action for action, _ in control.asked] == ["reset_prefix_cache"]


def test_the_page_to_try_it_has_a_form_for_everything_that_takes_a_body(router: RunningRouter) -> None:
    paths = router.client.get("/openapi.json").json()["paths"]
    takes_a_body = {path for path, verbs in paths.items() if "requestBody" in verbs.get("post", {})}
    assert set(examples()) == takes_a_body
    for path, example in examples().items():
        if path == "/v1/batches":  # the one that names what was sent before
            sent = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
            example = {**example, "input_file_id": router.client.post("/v1/files", **sent).json()["id"]}
        answer = router.client.post(path, json={"model": "fake", **example})
        assert answer.status_code == 200, (path, answer.text)
    page = router.client.get("/docs").text
    assert all(f'"{path}": ' in page for path in examples())
