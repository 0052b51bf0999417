"""TLS: clients speak it, a new certificate is loaded while the router serves, and a wrong one changes nothing."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tandem.router.config import RouterConfig, Timeouts
from tandem.router.http.certificate import Certificate
from tandem.wire.errors import ConfigurationError
from tests.router.conftest import RunningRouter, StartRouter


class Pair(NamedTuple):
    certificate: Path
    key: Path

    def copy_to(self, other: Pair) -> None:
        """As a renewal does: each file is replaced whole."""
        for mine, its in zip(self, other, strict=True):
            fresh = its.with_suffix(".new")
            shutil.copy(mine, fresh)
            fresh.replace(its)


MakePair = Callable[[str], Pair]


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed here")

    def make(name: str) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        pair = Pair(folder / "tls.crt", folder / "tls.key")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "9",
             "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", pair.key, "-out", pair.certificate],
            check=True, capture_output=True, timeout=30,
        )  # fmt: skip
        return pair

    return make


@pytest.fixture(scope="module")
def first(make_pair: MakePair) -> Pair:
    return make_pair("first")


@pytest.fixture(scope="module")
def second(make_pair: MakePair) -> Pair:
    return make_pair("second")


@pytest.fixture
def used(first: Pair, tmp_path: Path) -> Pair:
    pair = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    first.copy_to(pair)
    return pair


@pytest.fixture
def router(start_router: StartRouter, used: Pair) -> RunningRouter:
    return start_router(
        prefill=0,
        decode=0,
        aggregated=1,
        tls_certificate=str(used.certificate),
        tls_key=str(used.key),
        timeouts=Timeouts(header=0.5),
    )


def address(router: RunningRouter) -> tuple[str, int]:
    url = httpx.URL(router.url)
    assert url.port is not None
    return url.host, url.port


def shown_by(router: RunningRouter) -> str:
    return ssl.get_server_certificate(address(router), timeout=10)


def look(router: RunningRouter) -> None:
    server = router.server._http
    assert server is not None
    router.look(server.look_at_certificate)


def test_answers_and_streams_go_over_tls(router: RunningRouter, used: Pair) -> None:
    assert router.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(used.certificate))
    with httpx.Client(base_url=router.url, verify=trusting, trust_env=False, timeout=20) as client:
        body = {"model": "fake", "prompt": "the fox", "max_tokens": 5}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert list(answer.iter_lines())[-2] == "data: [DONE]"


def test_who_speaks_without_tls_gets_nothing_and_disturbs_none(router: RunningRouter) -> None:
    with socket.create_connection(address(router), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            said = connection.recv(1000)
        except ConnectionError:
            said = b""
        assert b"HTTP" not in said
    assert router.complete(max_tokens=2).status_code == 200


def test_a_handshake_without_an_end_has_the_time_of_a_header(router: RunningRouter) -> None:
    with socket.create_connection(address(router), timeout=10) as connection:
        assert connection.recv(1000) == b""
    assert router.complete(max_tokens=2).status_code == 200


def test_a_refused_body_is_answered_before_the_connection_ends(router: RunningRouter) -> None:
    with router.client.stream(
        "POST",
        "/v1/nothing",
        content=(b"x" * 1000 for _ in range(300)),
        headers={"content-type": "application/json"},
    ) as answer:
        answer.read()
        assert answer.status_code == 404


def test_a_new_certificate_is_shown_without_a_restart(
    router: RunningRouter, used: Pair, first: Pair, second: Pair
) -> None:
    assert shown_by(router).strip() == first.certificate.read_text().strip()
    (node,) = router.nodes.values()
    node.set(pause_at=3)
    with router.client.stream(
        "POST",
        "/v1/completions",
        json={"model": "fake", "prompt": "the fox", "max_tokens": 8, "stream": True},
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        second.copy_to(used)
        look(router)
        assert shown_by(router).strip() == second.certificate.read_text().strip()
        node.resume()
        assert [line for line in lines if line][-1] == "data: [DONE]", "what stood stays"


@pytest.mark.parametrize("wrong", ["half a pair", "no certificate", "gone"])
def test_a_pair_that_is_not_right_changes_nothing(
    router: RunningRouter, used: Pair, first: Pair, second: Pair, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    if wrong == "half a pair":
        shutil.copy(second.certificate, used.certificate)
    elif wrong == "no certificate":
        used.certificate.write_text("once upon a time")
    else:
        used.certificate.unlink()
    look(router)
    assert "the certificate is not renewed" in caplog.text
    assert shown_by(router).strip() == first.certificate.read_text().strip()
    second.copy_to(used)
    look(router)
    assert shown_by(router).strip() == second.certificate.read_text().strip()


def test_what_is_no_pair_is_a_mistake_at_the_start(first: Pair, second: Pair, tmp_path: Path) -> None:
    for certificate, key in [
        (first.certificate, second.key),
        (first.key, first.key),
        (first.certificate, tmp_path),
    ]:
        with pytest.raises(ConfigurationError, match=r"router.tls_certificate .* must be a certificate"):
            Certificate(str(certificate), str(key))
    with pytest.raises(ConfigurationError, match="No such file"):
        Certificate(str(tmp_path / "none"), str(first.key))


def test_a_key_with_a_passphrase_is_not_asked_for(first: Pair, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", first.key, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="without a passphrase"):
        Certificate(str(first.certificate), str(locked))


@pytest.mark.parametrize(
    ("given", "missing"), [("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")]
)
def test_one_of_the_two_is_not_enough(given: str, missing: str) -> None:
    with pytest.raises(ConfigurationError, match=f"router.{missing} must be set, because router.{given} is"):
        RouterConfig(tokenizer_path="x", model_name="x", **{given: "a file"})
