"""What a response was asked with, listed and counted."""

from __future__ import annotations

from typing import Any

from tests.router.conftest import RunningRouter


def test_openais_client_lists_and_counts_what_a_response_was_asked_with(router: RunningRouter) -> None:
    client = router.official_client()
    first = client.responses.create(model="fake", input="one", max_output_tokens=3)
    asked: Any = [{"role": "user", "content": "two"}]
    second = client.responses.create(model="fake", input=asked, previous_response_id=first.id, max_output_tokens=3)
    items: list[Any] = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert [items[0].content[0].text, items[2].content[0].text] == ["one", "two"]
    latest = client.responses.input_items.list(second.id)
    assert [item.id for item in latest.data] == [item.id for item in reversed(items)]
    prompt = router.nodes["p0"].submits[-1].prompt_token_ids
    counted = client.responses.input_tokens.count(model="fake", input=asked, previous_response_id=first.id)
    assert counted.input_tokens == len(prompt)
    whole = {"input": asked, "previous_response_id": first.id}
    assert router.client.post("/v1/responses/input_tokens", json=whole).json()["input_tokens"] == len(prompt)
    assert router.client.get(f"/v1/responses/{second.id}/input_items?limit=0").status_code == 400
    assert router.client.get("/v1/responses/resp_none/input_items").status_code == 404


def test_what_is_no_number_is_refused_and_no_bug(router: RunningRouter) -> None:
    made = router.ask("/v1/responses", input="one", background=True, max_output_tokens=2).json()
    path = f"/v1/responses/{made['id']}"
    for number in ("--5", "\u00b2", "\u0661", "5-", "x"):
        for place, fields in (("", {"stream": "true", "starting_after": number}), ("/input_items", {"limit": number})):
            assert router.client.get(path + place, params=fields).status_code == 400, number
