"""`tandem picker`: serves Envoy's external processing for a gateway in front of routers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tandem.base.errors import ConfigurationError, InternalError
from tandem.base.tasks import Tasks
from tandem.cluster.api_client import trusted
from tandem.cluster.picker.choice import RouterChoice
from tandem.cluster.picker.known_routers import ANSWER_S, LOOK_S, KnownRouters, RouterName
from tandem.cluster.tasks import first_of, has_ended
from tandem.wire.endpoints import address_of

if TYPE_CHECKING:
    import grpc

logger = logging.getLogger(__name__)

ENDS_WITHIN_S = 100.0  # answers that stream through it then break off; a second signal does that at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--routers", metavar="ADDRESS[,ADDRESS…]", required=True,
        help="the routers, as HOST:PORT, or https://HOST:PORT with TLS (SSL_CERT_FILE names further certificates to trust); each address of a host's name is a router, "
        "so a headless Service stands for all its pods",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="N", default=9002, help="port to listen at (default 9002)")
    parser.add_argument(
        "--tls-certificate", metavar="FILE", help="the gateway must then speak TLS; needs --tls-key, too"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="the certificate's key")


def run(options: argparse.Namespace) -> int:
    names = [RouterName.parse(one.strip()) for one in options.routers.split(",") if one.strip()]
    if not names:
        raise ConfigurationError("--routers is empty: write HOST:PORT")
    if not 0 <= options.port < 65536:
        raise ConfigurationError(f"--port must be from 0 to 65535, not {options.port}")
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise ConfigurationError("--tls-certificate and --tls-key belong together: give both or neither")
    asyncio.run(_serve(names, options))
    return 0


async def _serve(names: list[RouterName], options: argparse.Namespace) -> None:
    from tandem.cluster.picker.processing import Picker  # loads gRPC

    tasks, choice = Tasks(), RouterChoice()
    verify = trusted("https://" if any(name.is_tls for name in names) else "http://")
    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, verify=verify) as http:
        routers = KnownRouters(names, http, choice.forget)
        server = Picker(routers, choice).server()
        port = _listen(server, options)
        await server.start()
        tasks.spawn(_look(routers), "routers")
        print(f"the picker listens at {address_of(options.host, port)}", flush=True)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        # Without its look it would go on to send requests to routers that have gone. Kubernetes starts it again.
        died, _ = await first_of(tasks.failed(), stop.wait())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: asyncio.ensure_future(server.stop(None)))
        await server.stop(ENDS_WITHIN_S)
        await tasks.stop()
    if has_ended(died):
        raise InternalError(died.result())


async def _look(routers: KnownRouters) -> None:
    while True:
        await routers.look()
        await asyncio.sleep(LOOK_S)


def _listen(server: grpc.aio.Server, options: argparse.Namespace) -> int:
    import grpc

    address = address_of(options.host, options.port)
    with contextlib.suppress(RuntimeError):
        if options.tls_certificate is None:
            return int(server.add_insecure_port(address))
        renewing = grpc.dynamic_ssl_server_credentials(_certificate(options), lambda: _renewed(options))
        return int(server.add_secure_port(address, renewing))
    raise ConfigurationError(f"{address} cannot be listened at: is the port taken, or the address another machine's?")


def _certificate(options: argparse.Namespace) -> grpc.ServerCertificateConfiguration:
    import grpc

    from tandem.http_server.certificate import Certificate

    files = options.tls_certificate, options.tls_key
    Certificate(*files, ("--tls-certificate", "--tls-key"))  # says what is wrong with them
    pair = Path(files[1]).read_bytes(), Path(files[0]).read_bytes()
    return grpc.ssl_server_certificate_configuration([pair])


def _renewed(options: argparse.Namespace) -> grpc.ServerCertificateConfiguration | None:
    """Asked at each new connection. None: the certificate from before."""
    try:
        return _certificate(options)
    except (ConfigurationError, OSError) as error:
        logger.error("the certificate is not renewed, the one before is still used: %s", error)
        return None
