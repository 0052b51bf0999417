"""Requests made from our own API document, valid and not: each is answered as the document says.

Slow, because making such a request takes longer than answering it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from router.http.api_document import make_document
from tests.router.conftest import Running, bombarded

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def router(model_folder: str, end_token: int) -> Iterator[Running]:
    with bombarded(model_folder, end_token, max_model_len=64) as running:
        yield running


def operations() -> list[Any]:
    document = make_document(keys_required=False)
    # Or nearly every request would be refused for its model, and nothing behind that would be reached.
    for name in ("CompletionRequest", "ChatRequest"):
        document["components"]["schemas"][name]["properties"]["model"] = {"const": "fake"}
    return [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]


ASKED = [
    pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
    for operation in operations()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or operation.method == "post"
]


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "mode"), ASKED)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_answer_is_as_documented(
    router: Running, operation: Any, mode: GenerationMode, data: st.DataObject
) -> None:
    case = data.draw(operation.as_strategy(generation_mode=mode))
    response = case.call(base_url=router.url, timeout=20)
    case.validate_response(response, checks=CHECKS)
