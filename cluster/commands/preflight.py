"""Finds everything that would certainly fail, all of it at once and in well under a second, before anything is loaded."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tandem.api.text.chat_template import template_source
from tandem.base.errors import ConfigurationError
from tandem.cluster.commands.model_checks import check_context, check_hub, check_type
from tandem.cluster.commands.model_files import check_files
from tandem.cluster.config import TandemConfig
from tandem.cluster.describe import format_size
from tandem.cluster.models.adapters import adapter_place
from tandem.cluster.models.catalogue import PACKAGED
from tandem.cluster.models.resolved import draft_place
from tandem.cluster.models.store import Model, check_name, find_model, models_folder
from tandem.cluster.pools.placement import LocalMachine, computes_on_cpu, place_nodes
from tandem.cluster.pools.room import check_memory
from tandem.cluster.settings.combined import SettingsError
from tandem.engine.model.content import weight_files
from tandem.engine.model.source import find_source
from tandem.http_server.certificate import check_before_use
from tandem.kvtransfer.registry import CONNECTORS, find_connector
from tandem.router.config import RouterConfig
from tandem.wire.nodes import ENGINE_ROLES

_DEVICE = re.compile(r"auto|(cpu|cuda)(:\d+)?")
# NVIDIA's driver, WSL's, and Jetson's
_CUDA_DEVICES = ("nvidia*", "dxg", "nvhost*", "nvgpu*")


def check_before_start(config: TandemConfig, machine: LocalMachine) -> None:
    """Raises SettingsError with every reason why serving on this machine would fail."""
    _raise_all(
        check_current_folder,
        lambda: check_address(config.router.host, config.router.port),
        lambda: _check_events(config),
        lambda: _check_certificate(config.router),
        lambda: _check_model(config),
        lambda: check_device(config.model.device, machine.gpus),
        lambda: check_cache_folder(config.model.path),
        lambda: check_disks(config),
        lambda: check_context(config),
        lambda: check_type(config),
        *_paths_on_this_machine(config),
        lambda: place_nodes(config, machine),
        lambda: check_machine_memory(config, machine),
        lambda: _check_connector(config),
    )


def check_before_attach(config: TandemConfig) -> None:
    """Raises SettingsError with every reason why serving on a Ray cluster would fail, as far as that shows without its machines."""
    _raise_all(
        lambda: check_name(config.model.path, config.model.revision),
        *_paths_on_this_machine(config),
        lambda: _check_connector(config),
    )


def _raise_all(*checks: Callable[[], object]) -> None:
    reasons: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            reasons.append(str(error))
    if reasons:
        raise SettingsError(reasons)


def check_current_folder() -> None:
    """Raises ConfigurationError if it was deleted: Ray's processes start in it, and would end at once."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigurationError(
            "the folder in which this command was typed has been deleted since: go to another one (cd)"
        ) from None


def _paths_on_this_machine(config: TandemConfig) -> Iterator[Callable[[], object]]:
    """Yields a check for each path that this command reads or passes on."""
    for name, where in config.model.adapters.items():
        yield partial(adapter_place, name, where)
    if config.model.draft:
        yield partial(draft_place, config.model.draft)
    if (template := config.router.chat_template) is not None:
        yield partial(template_source, template)


def check_device(name: str, gpus: int, environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> None:
    """Raises ConfigurationError for what is no device, and for a CUDA device that is certainly not here. Does not import torch, which takes
    seconds."""
    if not _DEVICE.fullmatch(name):
        raise ConfigurationError(f"model.device must be auto, cpu, cuda or cuda:N, not {name}")
    if not name.startswith("cuda"):
        return
    if gpus:
        index = name.partition(":")[2]
        if index.isdecimal() and int(index) >= gpus:
            raise ConfigurationError(f"model.device is {name}, but the last CUDA device here is cuda:{gpus - 1}")
        return
    if importlib.metadata.version("torch").endswith("+cpu"):
        why = "the torch that is installed is a build for CPUs: install one with CUDA"
    elif environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        why = "CUDA_VISIBLE_DEVICES hides all: unset it"
    elif not any(next(devices.glob(kind), None) for kind in _CUDA_DEVICES) and not shutil.which("nvidia-smi"):
        why = (
            f"this machine has no CUDA device (no {devices}/nvidia*, no nvidia-smi): leave it at auto, or set it to cpu"
        )
    else:
        return
    raise ConfigurationError(f"model.device is {name}, but {why}")


def check_cache_folder(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigurationError if the folder for fetched models is needed, or named, and cannot be written."""
    if not environ.get("TANDEM_CACHE") and (name not in PACKAGED or find_model(name) is not None):
        return
    folder = models_folder(environ)
    try:
        _write_into(folder)
    except OSError as error:
        raise ConfigurationError(
            f"the folder for fetched models, {folder}, cannot be written ({error.strerror}): name another one with TANDEM_CACHE"
        ) from error


def check_disks(config: TandemConfig) -> None:
    """Raises ConfigurationError for tiers on a disk that cannot be used: the nodes would serve without them."""
    wanted: dict[str, int] = {}
    for role in ENGINE_ROLES:
        for tier in config.engine_of(role).cache.tiers if config.pools.of(role).first_size else ():
            if tier.disk is not None:
                wanted[tier.disk] = wanted.get(tier.disk, 0) + (tier.size or 0) * config.pools.of(role).first_size
    for folder, size in wanted.items():
        try:
            _write_into(Path(folder))
            there = sum(file.stat().st_blocks * 512 for file in Path(folder).glob("*.kv"))  # of nodes before these
            room = shutil.disk_usage(folder).free + there
        except OSError as error:
            raise ConfigurationError(f"cache.tiers: disk {folder!r} cannot be used: {error.strerror}") from error
        if room < size:
            raise ConfigurationError(
                f"cache.tiers: {folder} has room for {format_size(room)}, and the nodes' tiers take {format_size(size)}: give them less"
            )


def _write_into(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _check_model(config: TandemConfig) -> None:
    if check_model_here(config.model.path, config.model.revision) is None:
        check_hub(config.model.path)


def _check_events(config: TandemConfig) -> None:
    """The address must be this machine's; of the ports, a node takes the next free one."""
    events = config.cache.events
    for name in ("endpoint", "replay_endpoint"):
        host = urlsplit(getattr(events, name)).hostname
        if host is None:
            continue
        try:
            check_address(host, 0)
        except ConfigurationError:
            raise ConfigurationError(
                f"cache.events.{name}: {host} is not an address of this machine: name one that is, or 127.0.0.1"
            ) from None


def check_model_here(name: str, revision: str = "") -> Model | None:
    """Returns the model if it is on this machine, whole; None if it must be fetched."""
    check_name(name, revision)
    found = find_model(name)
    if found is not None:
        check_files(found.path)
    return found


def check_machine_memory(config: TandemConfig, machine: LocalMachine) -> None:
    on_cpu = computes_on_cpu(config, machine)
    check_memory(config, machine.free_memory, _weights_bytes(config.model.path), on_cpu=on_cpu)


def _weights_bytes(name: str) -> int:
    """Returns 0 if the model is not on this machine; other checks report a wrong name."""
    try:
        found = find_model(name)
        return sum(file.stat().st_size for file in weight_files(find_source(found.path))) if found is not None else 0
    except (ConfigurationError, OSError):
        return 0


def _check_connector(config: TandemConfig) -> None:
    name = config.transfer.connector
    if (
        config.pools.prefill.first_size and name not in CONNECTORS
    ):  # Tandem's own connectors need no check, and importing one takes a while
        find_connector(name)


def _check_certificate(router: RouterConfig) -> None:
    if router.tls_certificate is not None and router.tls_key is not None:
        check_before_use(router.tls_certificate, router.tls_key)


def check_address(host: str, port: int) -> None:
    """Binds to the address as the router will, then releases it. Raises ConfigurationError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigurationError(f"router.host {host!r} is not an address: use one of this machine's") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigurationError(_why_not(error, host, port)) from None


def _why_not(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {port} on {host} is taken: end what listens there, or choose another port (--port, router.port)"
            )
        case errno.EACCES:
            return f"port {port} needs privileges that this user lacks: choose one above 1023 (--port, router.port)"
        case errno.EADDRNOTAVAIL:
            return f"router.host {host!r} is not an address of this machine: name one that is, or 127.0.0.1"
        case _:
            return f"cannot listen on {host}:{port}: {error.strerror}"
