"""Every request of a client gets its answer or a 4xx that says why, and never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.api.openai.answer_types import ChatCompletion, Completion, ErrorBody
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.completion_request import CompletionRequest
from tests.router.bad_inputs import CHAT, COMPLETIONS, VALID
from tests.router.conftest import RunningRouter, bombarded

ANSWERS: dict[str, Any] = {COMPLETIONS: Completion, CHAT: ChatCompletion}
FIELDS = {COMPLETIONS: CompletionRequest.__struct_fields__, CHAT: ChatRequest.__struct_fields__}

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["auto", "none", "required", "text", "json_object", "user", "function", "fake"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "5", "x"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def router(model_folder: str, end_token: int) -> Iterator[RunningRouter]:
    with bombarded(model_folder, end_token, max_model_len=64) as running:
        yield running


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_field_with_any_value(router: RunningRouter, path: str, data: st.DataObject) -> None:
    names = st.sampled_from([name for name in FIELDS[path] if name != "stream"])
    fields = data.draw(st.dictionaries(names, ANYTHING, min_size=1, max_size=3))
    answer = router.client.post(
        path, content=json.dumps(VALID[path] | fields), headers={"content-type": "application/json"}
    )
    if answer.status_code == 200:
        msgspec.convert(answer.json(), ANSWERS[path])
    else:
        assert 400 <= answer.status_code < 500, answer.text
        msgspec.convert(answer.json(), ErrorBody)


@settings(max_examples=60, deadline=None)
@given(body=st.binary(max_size=100) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_any_body(router: RunningRouter, body: bytes) -> None:
    answer = router.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    msgspec.convert(answer.json(), ErrorBody)
