"""Adapters are models to clients: listed under their base, chosen by name, and each node is told which weights are meant."""

from __future__ import annotations

import pytest

from tandem.base.errors import AdapterMissing
from tandem.wire.adapters import identity_of
from tests.router.conftest import RunningRouter, StartRouter, error_of

SQL, LAW = "1" * 64, "2" * 64


def with_adapters(router: RunningRouter, adapters: dict[str, str]) -> None:
    for node in router.nodes.values():
        node.set(status_fields={"adapters": adapters})
    router.wait_for(lambda: router.server.services.pool.view.adapters() == adapters, "they are known")


@pytest.fixture
def router(start_router: StartRouter) -> RunningRouter:
    running = start_router(prefill=2, decode=2)
    with_adapters(running, {"sql": SQL, "law": LAW})
    return running


def test_they_are_listed_and_chosen_by_the_model_field_and_both_nodes_are_told(router: RunningRouter) -> None:
    cards = {card["id"]: card for card in router.client.get("/v1/models").json()["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {"fake": None, "sql": "fake", "law": "fake"}
    assert router.client.get("/v1/models/sql").json()["parent"] == "fake"
    answer = router.complete(model="sql", max_tokens=3)
    assert (answer.status_code, answer.json()["model"]) == (200, "sql")
    router.complete(model="fake", max_tokens=3)
    told = [submit.lora for node in router.nodes.values() for submit in node.submits]
    assert sorted(told, key=str) == sorted([identity_of("sql", SQL)] * 2 + [None] * 2, key=str)


def test_a_name_that_no_node_has_is_404(router: RunningRouter) -> None:
    answer = router.complete(model="tax", max_tokens=3)
    assert error_of(answer, 404)["message"] == "the model 'tax' does not exist; this server has fake, law, sql"
    with_adapters(router, {"law": LAW})
    assert router.complete(model="sql", max_tokens=3).status_code == 404


def test_a_node_that_lacks_it_refuses_and_another_one_answers_while_there_is_one(router: RunningRouter) -> None:
    lacks = AdapterMissing("not here").to_wire()
    for role in ("p0", "d0"):
        router.nodes[role].set(refuse=lacks)
        for _ in range(3):
            assert router.complete(model="sql", max_tokens=3).status_code == 200
    router.set(refuse=lacks)
    assert error_of(router.complete(model="sql", max_tokens=3), 503)["code"] == "adapter_missing"
