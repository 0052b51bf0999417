"""Receipts at a router's door: who gets none, and why. Answers that real nodes make again are in tests/integration/test_verify.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.base.errors import ConfigurationError
from tandem.base.wings import is_there
from tandem.router.receipts.receipt import read_receipt
from tests.router.conftest import RunningRouter, StartRouter, error_of

HEADER = "x-tandem-receipt"
# Anthropic's API has no seed.
MESSAGE = {"path": "/v1/messages", "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("receipts") / "receipts.key"
    file.write_bytes(b"0123456789abcdef" * 2)
    return str(file)


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter, key: str) -> RunningRouter:
    """The fake nodes say what real ones say where the same bits are required."""
    return keep_router(content="files+way", receipt_key_file=key)


def ask(router: RunningRouter, receipt: str = "sign", path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    asked = {} if "messages" in fields else {"prompt": "the fox"}
    body = {"model": "fake", "max_tokens": 5, **asked, **fields}
    return router.client.post(path, json=body, headers={HEADER: receipt})


def test_without_a_key_or_the_same_bits_nothing_is_signed(start_router: StartRouter, key: str) -> None:
    keyless = start_router()
    for router, why in (
        (keyless, "its operator has not set router.receipt_key_file"),
        (start_router(receipt_key_file=key), "the operator sets model.exact to require"),
    ):
        assert why in error_of(ask(router), 400)["message"]
    assert HEADER not in keyless.complete().headers


def test_what_a_receipt_is_not_of(router: RunningRouter) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stream": True}, "not with stream"),
        ({"n": 3}, "is of one answer, and this request has 3"),
        ({"prompt": ["a", "b"]}, "is of one answer, and this request has 2"),
        ({"receipt": "no receipt"}, "this cluster did not sign this receipt"),
        *([(MESSAGE, "is of answers at /v1/completions")] if is_there("tandem.router.messages") else []),
    ]
    for fields, said in cases:
        answer = ask(router, **fields)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]


def test_a_receipt_says_what_the_answer_was_made_of(router: RunningRouter) -> None:
    first = ask(router, logprobs=1, logit_bias={"7": 2.5})
    text = first.headers[HEADER]
    receipt = read_receipt(text)
    assert (receipt.path, receipt.content, receipt.adapter) == ("/v1/completions", "files+way", "")
    assert receipt.answer.tokens == 5
    assert receipt.sampling["logit_bias"] == {"7": 2.5}
    # The router drew the seed; with it the request is the same again.
    assert ask(router, text, logprobs=1, logit_bias={"7": 2.5}, seed=receipt.seed).headers[HEADER] == text
    other = ask(router, text, logprobs=1, logit_bias={"7": 2.5}, seed=receipt.seed + 1)
    assert "which differs in its sampling" in error_of(other, 400)["message"]


@pytest.mark.parametrize(("content", "said"), [(b"short", "has 5 bytes"), (None, "cannot be read: No such file")])
def test_a_key_that_cannot_serve_is_refused_when_the_router_starts(
    start_router: StartRouter, tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        start_router(receipt_key_file=str(file))
