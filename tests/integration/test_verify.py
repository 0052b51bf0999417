"""`tandem verify` between real deployments: prefill and decode apart and together give the same bits, another type gives others; an answer
is made again by its receipt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.cluster.cli import main
from tandem.router.receipts.receipt import read_receipt, signed
from tests.integration.conftest import PATIENCE_S, Deploy, RunningDeployment, float32_config
from tests.waiting import until

REQUEST = {"prompt": "Once upon a time there was", "max_tokens": 24, "temperature": 1.0, "logprobs": 1}
RECEIPT = "x-tandem-receipt"


def deployed(deploy: Deploy, path: Path, key: Path, dtype: str, *pools: int) -> Any:
    base = float32_config(path, *pools)
    replace = msgspec.structs.replace
    return deploy(
        replace(
            base,
            model=replace(base.model, dtype=dtype, exact="require"),
            cache=replace(base.cache, memory_bytes=512 << 20),
            router=replace(base.router, receipt_key_file=str(key)),
            debug=False,
        )
    )


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "receipts.key"
    file.write_bytes(b"0123456789abcdef" * 2)
    return file


@pytest.fixture(scope="module")
def apart(deploy: Deploy, smollm2_path: Path, key: Path) -> Iterator[RunningDeployment]:
    with deployed(deploy, smollm2_path, key, "float32", 1, 1) as running:
        yield running


@pytest.fixture(scope="module")
def together(deploy: Deploy, smollm2_path: Path, key: Path) -> Iterator[RunningDeployment]:
    with deployed(deploy, smollm2_path, key, "float32", 0, 0, 1) as running:
        yield running


def test_prefill_and_decode_apart_and_together_give_the_same_bits(
    apart: RunningDeployment, together: RunningDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["verify", "--url", apart.url, "--url", f"{together.url}/v1", "--at-once", "8", "--max-tokens", "8"]
    assert main([*asked, "--timeout", "200"]) == 0
    assert capsys.readouterr().out.startswith("same bits: 16 requests, ")
    apart.until_quiet()


def test_requests_of_a_file(
    apart: RunningDeployment, together: RunningDeployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asked.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0.7}
    file.write_text(f"{json.dumps(REQUEST)}\n{json.dumps(chat)}\n")
    assert main(["verify", str(file), "--url", apart.url, "--url", together.url, "-o", "json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["same"], verdict["requests"], verdict["tokens"]) == (True, 2, 32)


def test_the_canary_compares_the_bits_of_what_was_handed_over(apart: RunningDeployment) -> None:
    until(lambda: apart.counters("decode")["kv_checks"] >= 1, PATIENCE_S)
    assert all(not node["counters"]["wrong_kv"] for node in apart.nodes("decode"))


def test_an_answer_is_made_again_by_its_receipt(
    apart: RunningDeployment, together: RunningDeployment, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = apart.http.post("/v1/completions", json=REQUEST, headers={RECEIPT: "sign"})
    assert answer.status_code == 200, answer.text
    told = read_receipt(answer.headers[RECEIPT])
    assert told.answer.tokens == 24
    assert "-float32-torch-" in told.content.partition("+")[2]
    file, body = tmp_path / "receipt", tmp_path / "request.json"
    file.write_text(answer.headers[RECEIPT])
    body.write_text(json.dumps(REQUEST))
    asked = ["verify", str(file), "--request", str(body), "--url"]
    for server in (apart, together):
        assert main([*asked, server.url]) == 0
        assert capsys.readouterr().out == "same bits: 24 tokens, made again\n"

    # Another answer, signed by the cluster's own key
    tokens = msgspec.structs.replace(told.answer, marks="00000000" + told.answer.marks[8:], digest="")
    file.write_text(signed(msgspec.structs.replace(told, answer=tokens), key.read_bytes()))
    assert main([*asked, apart.url]) == 1
    assert "other bits: the answers part at token 0 of 24" in capsys.readouterr().out

    file.write_text(signed(told, b"a key that is not of this cluster"))
    assert main([*asked, apart.url]) == 2
    assert "this cluster did not sign this receipt" in capsys.readouterr().err

    file.write_text(answer.headers[RECEIPT])
    body.write_text(json.dumps({**REQUEST, "prompt": "Another"}))
    assert main([*asked, apart.url]) == 2
    assert "it is the receipt of another request, which differs in its prompt" in capsys.readouterr().err


@pytest.mark.more  # a deployment of its own; tests/cluster/verify has what is said of other bits
def test_another_type_gives_other_bits(
    deploy: Deploy, smollm2_path: Path, key: Path, together: RunningDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed(deploy, smollm2_path, key, "bfloat16", 0, 0, 1) as other:
        assert main(["verify", "--url", together.url, "--url", other.url, "--max-tokens", "4"]) == 1
    said = capsys.readouterr().out
    assert "other bits in 16 of 16 requests" in said
    assert "The first: a prompt of 1 token, temperature 0.0, choice 0, token 0 of the answer: " in said
