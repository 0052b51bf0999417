"""`tandem picker` as a gateway uses it: a client of Envoy's protocol, and routers whose health a test decides."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import struct_pb2, wrappers_pb2
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.cluster.cli import main
from tandem.cluster.picker import known_routers, messages
from tandem.cluster.picker.choice import RouterChoice, is_kept
from tandem.cluster.picker.known_routers import KnownRouters, RouterName
from tests.certificates import Pair, make_pair
from tests.integration.cluster_lab import until_true
from tests.small_server import SmallServer

CHOSEN = "x-gateway-destination-endpoint"
WITHIN_S = 30.0


class Router(SmallServer):
    """Answers /health as it is told."""

    def __init__(self, pair: Pair | None = None) -> None:
        self.status = 200
        super().__init__(lambda path: (self.status, {}, b'{"status": "played"}'), pair)


@contextmanager
def picker(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tandem.cluster.cli", "picker", "--port", "0", *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"listens at (\S+)", process.stdout.readline())
        assert found is not None
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


class Gateway:
    """The other side of the protocol."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._process = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            messages.ProcessingRequest.SerializeToString,
            messages.ProcessingResponse.FromString,
        )
        self.check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            wrappers_pb2.StringValue.SerializeToString,
            wrappers_pb2.Int32Value.FromString,
        )

    def ask(self, *requests: Any) -> list[Any]:
        return list(self._process(iter(requests), timeout=WITHIN_S))

    def chosen(self, **headers: Any) -> str:
        (answer,) = self.ask(begin(**headers))
        if answer.HasField("immediate_response"):
            return str(answer.immediate_response.status.code)
        (option,) = answer.request_headers.response.header_mutation.set_headers
        assert option.header.key == CHOSEN
        assert option.append_action == messages.OVERWRITE
        value = option.header.raw_value.decode()
        assert dict(answer.dynamic_metadata["envoy.lb"]) == {CHOSEN: value}
        return value


def kind_of(message: Any) -> str:
    (field, _), *_ = message.ListFields()
    return str(field.name)


def begin(
    path: str = "/v1/chat/completions", key: str = "", subset: list[str] | None = None, duplex: bool = False
) -> Any:
    headers = {":path": path, ":method": "POST", **({"authorization": f"Bearer {key}"} if key else {})}
    metadata = messages.Metadata()
    if subset is not None:
        hint = struct_pb2.Struct()
        hint.update({f"{CHOSEN}-subset": subset})
        metadata.filter_metadata.add(key="envoy.lb.subset_hint", value=hint)
    mode = messages.DUPLEX if duplex else 0
    return messages.ProcessingRequest(
        request_headers=messages.HttpHeaders(
            headers=messages.HeaderMap(
                headers=[messages.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
            )
        ),
        metadata_context=metadata,
        protocol_config=messages.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
    )


@pytest.fixture(scope="module")
def routers() -> Iterator[list[Router]]:
    both = [Router(), Router()]
    yield both
    for router in both:
        router.close()


@pytest.fixture(scope="module")
def shared(routers: list[Router]) -> Iterator[Gateway]:
    named = ",".join(router.address for router in routers)
    with picker("--routers", named) as (_, address), grpc.insecure_channel(address) as channel:
        yield Gateway(channel)


@pytest.fixture
def gateway(shared: Gateway, routers: list[Router]) -> Gateway:
    for router in routers:
        router.status = 200
    both = {router.address for router in routers}
    until_true(lambda: {shared.chosen() for _ in range(2)} == both, "both routers are chosen", WITHIN_S)
    return shared


def test_requests_are_spread_and_a_router_that_takes_none_gets_none(gateway: Gateway, routers: list[Router]) -> None:
    counts = Counter(gateway.chosen() for _ in range(20))
    assert sorted(counts.values()) == [10, 10]
    routers[0].status = 503
    until_true(
        lambda: {gateway.chosen() for _ in range(2)} == {routers[1].address}, "only the other is chosen", WITHIN_S
    )
    routers[1].status = 503
    until_true(lambda: gateway.chosen() == "503", "the gateway is told that there is none", WITHIN_S)
    (refusal,) = gateway.ask(begin())
    error = json.loads(refusal.immediate_response.body)["error"]
    assert "503" in error["message"]
    assert routers[0].address in error["message"]


def test_what_a_router_keeps_is_asked_of_that_router(gateway: Gateway, routers: list[Router]) -> None:
    for path in ("/v1/files", "/v1/batches/batch_1/cancel", "/v1/responses?stream=true"):
        by_key = {key: {gateway.chosen(path=path, key=key) for _ in range(3)} for key in map(str, range(16))}
        assert all(len(found) == 1 for found in by_key.values())
        assert {one for found in by_key.values() for one in found} == {router.address for router in routers}


def test_only_what_the_gateway_allows(gateway: Gateway, routers: list[Router]) -> None:
    allowed = routers[1].address
    assert {gateway.chosen(subset=["10.0.0.1:8000", allowed]) for _ in range(3)} == {allowed}
    assert gateway.chosen(subset=["10.0.0.1:8000"]) == gateway.chosen(subset=[]) == "503"


def test_bodies_pass_through_where_the_gateway_has_them_do_so(gateway: Gateway) -> None:
    def body(data: bytes, end: bool) -> Any:
        return messages.HttpBody(body=data, end_of_stream=end)

    def rest() -> list[Any]:
        return [
            messages.ProcessingRequest(request_body=body(b"que", False)),
            messages.ProcessingRequest(request_body=body(b"stion", True)),
            messages.ProcessingRequest(response_headers=messages.HttpHeaders()),
            messages.ProcessingRequest(response_body=body(b"answer", False)),
            messages.ProcessingRequest(response_body=body(b"", True)),
            messages.ProcessingRequest(response_trailers=messages.HttpTrailers()),
        ]

    kinds = [kind_of(request) for request in rest()]
    _, *passed = gateway.ask(begin(duplex=True), *rest())
    assert [kind_of(one) for one in passed] == kinds
    pieces = [
        getattr(one, kind).response.body_mutation.streamed_response
        for one, kind in zip(passed, kinds, strict=True)
        if kind.endswith("_body")
    ]
    assert [(piece.body, piece.end_of_stream) for piece in pieces] == [
        (b"que", False), (b"stion", True), (b"answer", False), (b"", True),
    ]  # fmt: skip
    _, *left = gateway.ask(begin(), *rest())
    assert [kind_of(one) for one in left] == kinds
    assert not any(one.request_body.response.HasField("body_mutation") for one in left)


def test_its_health(gateway: Gateway) -> None:
    for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert gateway.check(wrappers_pb2.StringValue(value=name), timeout=WITHIN_S).value == 1
    with pytest.raises(grpc.RpcError) as refused:
        gateway.check(wrappers_pb2.StringValue(value="other"), timeout=WITHIN_S)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_tls_and_an_end_that_waits_for_answers(tmp_path: Path, routers: list[Router]) -> None:
    pair = make_pair(tmp_path, "picker")
    tls = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    with picker("--routers", routers[0].address, *tls) as (process, address):
        trusted = grpc.ssl_channel_credentials(pair.certificate.read_bytes())
        with grpc.secure_channel(address, trusted) as channel:
            gateway = Gateway(channel)
            until_true(lambda: gateway.chosen() == routers[0].address, "its router is chosen", WITHIN_S)
            go_on = threading.Event()

            def slow() -> Iterator[Any]:
                yield begin()
                go_on.wait(WITHIN_S)
                yield messages.ProcessingRequest(response_headers=messages.HttpHeaders())

            answers = gateway._process(slow(), timeout=WITHIN_S)
            next(answers)
            process.terminate()
            go_on.set()
            assert [kind_of(one) for one in answers] == ["response_headers"]
        assert process.wait(WITHIN_S) == 0


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_router_that_speaks_tls_is_known_by_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routers: list[Router], is_trusted: bool
) -> None:
    pair = make_pair(tmp_path, "router")
    secret, plain = Router(pair), routers[0]
    plain.status = 200
    known = {secret.address, plain.address} if is_trusted else {plain.address}
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
    try:
        named = f"https://{secret.address},{plain.address}"
        with picker("--routers", named) as (_, address), grpc.insecure_channel(address) as channel:
            gateway = Gateway(channel)
            until_true(lambda: {gateway.chosen() for _ in range(2)} == known, "these are chosen", WITHIN_S)
    finally:
        secret.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--routers", "tandem"], "'tandem' is no router's address: write HOST:PORT"),
        (["--routers", "http://a:8000/v1"], "is no router's address"),
        (["--routers", ","], "--routers is empty"),
        (["--routers", "a:1", "--tls-key", "k"], "give both or neither"),
        (["--routers", "a:1", "--tls-key", "no", "--tls-certificate", "none"], "--tls-certificate none cannot be read"),
        (["--routers", "a:1", "--port", "70000"], "--port must be from 0 to 65535"),
    ],
)
def test_what_is_wrong_with_its_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["picker", *words]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_taken_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["picker", "--routers", "a:1", "--port", str(port)]) == 1
    assert f"127.0.0.1:{port} cannot be listened at" in " ".join(capsys.readouterr().err.split())


names = st.lists(st.from_regex(r"\A10\.0\.0\.[1-9][0-9]?:8000\Z"), min_size=1, max_size=8, unique=True)


@given(names, st.binary(max_size=8))
def test_a_router_that_leaves_takes_only_its_own_owners_along(routers: list[str], owner: bytes) -> None:
    choice = RouterChoice()
    before = choice.pick(routers, "/v1/files", owner)
    for gone in routers:
        rest = [router for router in routers if router != gone]
        now = choice.pick(rest, "/v1/files", owner)
        assert now == (before if gone != before else now)
        assert (now is None) == (not rest)


@given(names, st.lists(st.booleans(), max_size=60))
def test_no_router_has_two_requests_more_than_another_had_room_for(routers: list[str], begins: list[bool]) -> None:
    choice, running = RouterChoice(), []
    for does_begin in begins:
        if does_begin:
            router = choice.pick(routers, "/v1/completions", b"")
            assert router is not None
            assert choice.running[router] == min(choice.running[one] for one in routers)
            choice.begin(router)
            running.append(router)
        elif running:
            choice.end(running.pop(0))
    assert choice.running == Counter(running)


def test_paths_that_only_look_alike_are_spread() -> None:
    assert is_kept("/v1/responses/resp_1")
    assert not is_kept("/v1/responses-of-others")


async def test_each_address_of_a_name_is_a_router_and_one_silence_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    silent: set[str] = set()
    names: dict[str, list[str]] = {"tandem": ["10.0.0.1", "10.0.0.2"]}
    gone: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host in silent:
            raise httpx.ReadTimeout("")
        return httpx.Response(200)

    async def found(host: str, port: int, **_: Any) -> list[Any]:
        if host not in names:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(0, 0, 0, "", (ip, port)) for ip in names[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found, raising=False)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        routers = KnownRouters([RouterName.parse("tandem:8000")], http, gone.extend)
        assert not routers.has_looked
        await routers.look()
        assert routers.ready == ["10.0.0.1:8000", "10.0.0.2:8000"]
        silent.add("10.0.0.1")
        await routers.look()
        assert routers.ready == ["10.0.0.1:8000", "10.0.0.2:8000"]
        await routers.look()
        assert routers.ready == ["10.0.0.2:8000"]
        del names["tandem"]
        await routers.look()
        assert routers.ready == ["10.0.0.2:8000"]
        names["tandem"] = []
        await routers.look()
        assert routers.ready == []
        assert gone == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_a_router_that_answers_piece_by_piece_for_ever_holds_up_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' readiness would stay as it was."""
    monkeypatch.setattr(known_routers, "ANSWER_S", 0.5)
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
            while not ended.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        try:
            async with httpx.AsyncClient(timeout=0.5, trust_env=False) as http:
                routers = KnownRouters([RouterName.parse(address)], http)
                await routers.look()
            assert routers.why_none.startswith(f"{address}: no answer within")
        finally:
            ended.set()
            dripping.join()


async def test_a_name_that_cannot_be_one_is_a_router_that_is_not_there() -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        routers = KnownRouters([RouterName.parse(f"{'a' * 70}.example:8000")], http)
        await routers.look()
        assert (routers.has_looked, routers.ready) == (True, [])


def test_a_picker_that_looks_no_longer_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would go on to send requests to routers that have gone."""

    async def fail(_: KnownRouters) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(KnownRouters, "look", fail)
    assert main(["picker", "--port", "0", "--routers", "127.0.0.1:9"]) == 1
    assert "routers died: RuntimeError('a mistake of ours')" in capsys.readouterr().err


def test_addresses_of_version_6() -> None:
    assert RouterName.parse("[2600::1]:8000") == RouterName("2600::1", 8000)
    with pytest.raises(ConfigurationError):
        RouterName.parse("2600::1")
