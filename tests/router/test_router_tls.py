"""TLS: clients speak it, a new certificate is loaded while the router serves, and a wrong one changes nothing."""

from __future__ import annotations

import contextlib
import io
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.base.wings import is_there
from tandem.cluster.cli import main, make_parser
from tandem.cluster.commands.preflight import check_before_start
from tandem.cluster.commands.setting_options import read_settings
from tandem.cluster.config import TandemConfig
from tandem.cluster.pools.placement import LocalMachine
from tandem.cluster.settings.combined import SettingsError
from tandem.engine.config import ModelConfig
from tandem.http_server.certificate import Certificate, check_before_use
from tandem.http_server.serving import HANDSHAKES
from tandem.router.config import Limits, RouterConfig, Timeouts
from tests.certificates import Pair, make_pair
from tests.router.conftest import RunningRouter, StartRouter


def dated_certificate(folder: Path, key: Path, begins: str, ends: str) -> Path:
    """A certificate of `key`, signed by itself. `openssl ca` is the one command whose every version takes dates."""
    (folder / "index").touch()
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca = one\n[one]\ndatabase = {folder}/index\nnew_certs_dir = {folder}\nrand_serial = yes\n"
        "default_md = sha256\npolicy = any\n[any]\ncommonName = supplied\n"
    )
    for words in (
        ["openssl", "req", "-new", "-key", key, "-subj", "/CN=dated", "-out", folder / "request"],
        ["openssl", "ca", "-batch", "-selfsign", "-config", folder / "ca.cnf", "-keyfile", key, "-in", folder / "request",
         "-startdate", begins, "-enddate", ends, "-notext", "-out", folder / "dated.crt"],
    ):  # fmt: skip
        subprocess.run(words, check=True, capture_output=True, timeout=30)
    return folder / "dated.crt"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("first"), "first")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("second"), "second")


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
    server = router.server.http
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


def test_who_speaks_no_tls_gets_nothing_and_disturbs_none(router: RunningRouter) -> None:
    # The second one says nothing: a handshake has the time of a header.
    for says in (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b""):
        with socket.create_connection(address(router), timeout=10) as connection:
            connection.sendall(says)
            try:
                said = connection.recv(1000)
            except ConnectionError:
                said = b""
            assert b"HTTP" not in said
        assert router.complete(max_tokens=2).status_code == 200


def test_handshakes_without_an_end_take_no_more_than_their_share(start_router: StartRouter, used: Pair) -> None:
    """The oldest give way, long before their time is over: each has a descriptor, which nodes and files may need."""
    router = start_router(
        prefill=0,
        decode=0,
        aggregated=1,
        tls_certificate=str(used.certificate),
        tls_key=str(used.key),
        limits=Limits(connections=8),
        timeouts=Timeouts(header=600),
    )
    with contextlib.ExitStack() as opened:
        waiting = [
            opened.enter_context(socket.create_connection(address(router), timeout=20)) for _ in range(HANDSHAKES + 8)
        ]
        assert router.complete(max_tokens=2).status_code == 200
        assert all(connection.recv(1000) == b"" for connection in waiting[:8])
        waiting[-1].settimeout(0)
        with pytest.raises(BlockingIOError):
            waiting[-1].recv(1000)


def test_a_refused_body_is_answered_before_the_connection_ends(router: RunningRouter) -> None:
    with router.client.stream(
        "POST", "/v1/nothing", content=(b"x" * 1000 for _ in range(300)), headers={"content-type": "application/json"}
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
        "POST", "/v1/completions", json={"model": "fake", "prompt": "the fox", "max_tokens": 8, "stream": True}
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
    for certificate, key, sentence in [
        (first.certificate, second.key, "is not the key of router.tls_certificate"),
        (first.key, first.key, "must be a certificate with its chain"),
        (first.certificate, tmp_path, "tls_key .* cannot be read: Is a directory"),
        (tmp_path / "none", first.key, "tls_certificate .* cannot be read: No such file"),
        (first.certificate, locked(first, tmp_path), "has a passphrase: write it without"),
    ]:
        with pytest.raises(ConfigurationError, match=sentence):
            Certificate(str(certificate), str(key))
        with pytest.raises(ConfigurationError, match=sentence):
            check_before_use(str(certificate), str(key))


def locked(pair: Pair, folder: Path) -> Path:
    made = folder / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", made],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("begins", "ends", "sentence"),
    [("20200101000000Z", "20200301000000Z", "has expired"), ("29990101000000Z", "29990301000000Z", "is not valid yet")],
)
def test_a_certificate_that_clients_refuse_is_found_before_anything_starts(
    first: Pair, tmp_path: Path, begins: str, ends: str, sentence: str
) -> None:
    made = dated_certificate(tmp_path, first.key, begins, ends)
    config = TandemConfig(model=ModelConfig(path=str(tmp_path)))
    router = msgspec.structs.replace(config.router, port=0, tls_certificate=str(made), tls_key=str(first.key))
    with pytest.raises(SettingsError, match=rf"router\.tls_certificate .* {sentence}, so clients refuse it"):
        check_before_start(msgspec.structs.replace(config, router=router), LocalMachine(cores=(0, 1)))
    Certificate(str(made), str(first.key))  # a router that is replaced goes on with it
    check_before_use(str(first.certificate), str(first.key))


@pytest.mark.parametrize("door", ["flags", "a file"])
def test_the_settings_make_a_router_that_the_commands_reach_over_tls(
    start_router: StartRouter,
    used: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    door: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["config"]
    if door == "flags":
        words += ["--ssl-certfile", str(used.certificate), "--ssl-keyfile", str(used.key)]
    else:
        text = f"router: {{tls_certificate: {used.certificate}, tls_key: {used.key}}}"
        (tmp_path / "tandem.yaml").write_text(text)
    config = read_settings(make_parser().parse_args(words)).config.router
    router = start_router(
        prefill=0, decode=0, aggregated=1, tls_certificate=config.tls_certificate, tls_key=config.tls_key
    )

    def asked(*words: str) -> tuple[int, str]:
        status = main([*words, "--url", router.url])
        told = capsys.readouterr()
        return status, told.out + told.err

    monkeypatch.setenv("SSL_CERT_FILE", str(used.certificate))
    assert asked("status")[0] == 0
    assert asked("top", "--once")[0] == 0
    assert asked("trace")[0] == 0
    if door == "flags":
        if is_there("tandem.cluster.chat"):
            monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
            status, told = asked("chat", "--max-tokens", "3")
            assert (status, "does not answer" in told) == (0, False), told
        monkeypatch.delenv("SSL_CERT_FILE")
        status, told = asked("status")
        assert (status, "its authority's file in SSL_CERT_FILE" in told) == (1, True), told


def test_a_command_that_takes_the_other_scheme_is_told(
    start_router: StartRouter, used: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(used.certificate))
    secret = start_router(tls_certificate=str(used.certificate), tls_key=str(used.key))
    assert main(["status", "--url", secret.url.replace("https://", "http://")]) == 1
    assert "if it serves with TLS, its address begins with https://" in capsys.readouterr().err
    assert main(["status", "--url", start_router().url.replace("http://", "https://")]) == 1
    assert "if it serves without, its address begins with http://" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "missing"), [("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")])
def test_one_of_the_two_is_not_enough(given: str, missing: str) -> None:
    with pytest.raises(ConfigurationError, match=f"router.{missing} must be set, because router.{given} is"):
        RouterConfig(tokenizer_path="x", model_name="x", **{given: "a file"})
