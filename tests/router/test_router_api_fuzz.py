"""Valid and invalid requests generated from Tandem's own API document: each is answered as the document says.

Slow, because generating such a request takes longer than answering it. The generator takes a second to import, so it is not imported
when pytest collects this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.router.http.api_document import make_document
from tests.router.conftest import RunningRouter, bombarded

EXAMPLES = 15 * int(os.environ.get("TANDEM_EXAMPLES", "0")) or 6
VALID, INVALID = "positive", "negative"
COUNTS = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")  # read what the paths that answer read
ASKED = [
    pytest.param(path, method, mode, marks=[pytest.mark.more] if path in COUNTS else [])
    for path, methods in make_document(keys_required=False)["paths"].items()
    for method, operation in methods.items()
    for mode in (VALID, INVALID)
    if mode == VALID or "requestBody" in operation
]


@pytest.fixture(scope="module")
def router(model_folder: str, end_token: int) -> Iterator[RunningRouter]:
    with bombarded(model_folder, end_token, max_model_len=64) as running:
        yield running


@pytest.fixture(scope="module")
def api() -> Any:
    import schemathesis

    document = make_document(keys_required=False)
    # Without this nearly every request would be refused for its model, and later checks would not be reached.
    schemas = document["components"]["schemas"]
    for name in schemas.keys() & {"CompletionRequest", "ChatRequest", "ResponsesRequest", "MessagesRequest"}:
        schemas[name]["properties"]["model"] = {"const": "fake"}
    if (verify := schemas.get("AskAgain")) is not None:  # for so long it would listen
        verify["properties"]["seconds"] = {"type": "number", "maximum": 0.1}
        verify["required"].append("seconds")
    return schemathesis.openapi.from_dict(document)


@pytest.fixture(scope="module")
def checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    return [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), ASKED)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_answer_is_as_documented(
    router: RunningRouter, api: Any, checks: list[Any], path: str, method: str, mode: str, data: st.DataObject
) -> None:
    from schemathesis import GenerationMode

    case = data.draw(api[path][method].as_strategy(generation_mode=GenerationMode(mode)))
    response = case.call(base_url=router.url, timeout=20)
    case.validate_response(response, checks=checks)
