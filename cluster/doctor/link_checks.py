"""Checks what can be wrong between this machine and others, and between its GPUs: RDMA, locked memory, clocks, ports."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tandem.cluster.config import PoolsConfig
from tandem.cluster.describe import format_size
from tandem.cluster.doctor.machine_checks import Check, Finding, fail, has_gpu, last_line, ok, run_python, warn
from tandem.machine.pci import read_text
from tandem.wire.nodes import Role

_CONNECT_S = 3.0
_RAY_PORTS = (6379, 8076)  # of the head
_CAP_IPC_LOCK = 1 << 14
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
# For a synchronised clock, the kernel's bound of the error is far below this
_MICROSECONDS_OF_ANY_CLOCK = 1_000_000

RDMA_DEVICES = Path("/sys/class/infiniband")


def link_checks(hosts: Sequence[str], pools: PoolsConfig) -> dict[str, Check]:
    """`hosts` are the cluster's other machines that the operator named."""
    spread = [f"pools.{role.value}" for role in Role if pools.of(role).last_size and pools.of(role).machines > 1]
    return {
        "rdma": lambda: check_rdma(RDMA_DEVICES, Path("/dev/infiniband")),
        "memlock": lambda: check_locked_memory(
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], own_capabilities(), rdma_devices(RDMA_DEVICES)
        ),
        **({"peers": check_gpu_peers} if has_gpu() else {}),
        "clock": lambda: check_clock(*kernel_clock()),
        **({"ranks": lambda: check_spread(spread, hosts)} if spread else {}),
        **{f"to {host}": lambda host=host: check_reach(host, probed_ports()) for host in hosts},  # type: ignore[misc]
    }


# --- RDMA


def rdma_devices(folder: Path) -> list[str]:
    try:
        return sorted(device.name for device in folder.iterdir())
    except OSError:
        return []


def check_rdma(folder: Path, verbs: Path) -> Finding:
    """`folder` is where the kernel describes the devices, `verbs` where processes open them."""
    devices = rdma_devices(folder)
    if not devices:
        return ok("no RDMA device: between machines KV travels over TCP")
    ports = [_port(port) for device in devices for port in sorted((folder / device / "ports").glob("*"))]
    active = [text for text, is_active in ports if is_active]
    what = ", ".join(active or [text for text, _ in ports] or devices)
    if not active:
        return warn(
            f"no port is active: {what}",
            "look at the cable, the switch and, for InfiniBand, the subnet manager (ibstat); until then KV travels over TCP",
        )
    usable = [file for file in verbs.glob("uverbs*") if os.access(file, os.R_OK | os.W_OK)]
    if not usable:
        return warn(
            f"{what}, but no {verbs}/uverbs* can be opened here",
            "give the container the devices (docker run --device /dev/infiniband; on Kubernetes the rdma component), or this user "
            "the right to read and write them",
        )
    return ok(what)


def _port(folder: Path) -> tuple[str, bool]:
    """Describes the port, and returns whether it is active. The kernel writes `4: ACTIVE`, `400 Gb/sec (4X NDR)`, `InfiniBand`."""
    state = read_text(folder / "state").partition(":")[2].strip() or "state unknown"
    rate = read_text(folder / "rate").partition(" (")[0]
    layer = read_text(folder / "link_layer")
    device = folder.parent.parent.name
    parts = " ".join(part for part in (layer, rate, state.lower()) if part)
    return f"{device}:{folder.name} {parts}", state == "ACTIVE"


def check_locked_memory(limit: int, capabilities: int, devices: Sequence[str]) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return ok("no limit on locked memory")
    if capabilities & _CAP_IPC_LOCK:
        return ok("no limit on locked memory (IPC_LOCK)")
    what = f"up to {format_size(limit)} of locked memory"
    if not devices:
        return ok(f"{what}; nothing here needs more without RDMA")
    return warn(
        f"{what}: RDMA locks the whole KV cache",
        "take the limit away: ulimit -l unlimited, LimitMEMLOCK=infinity for a service, docker run --ulimit memlock=-1; in a pod it is "
        "that of the container runtime's service on the machine",
    )


def own_capabilities() -> int:
    """Returns this process's effective capabilities as the kernel's bits."""
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


# --- GPUs


def check_gpu_peers() -> Finding:
    """Checks whether every GPU can read every other GPU's memory directly, without host memory."""
    child = run_python(
        "import json, torch\n"
        "count = torch.cuda.device_count()\n"
        "pairs = [(a, b) for a in range(count) for b in range(count) if a != b]\n"
        "print(json.dumps([count, [p for p in pairs if not torch.cuda.can_device_access_peer(*p)]]))"
    )
    if child.returncode != 0:
        return warn(last_line(child), "see the finding on torch first")
    count, apart = msgspec.json.decode(child.stdout, type=tuple[int, list[tuple[int, int]]])
    return judge_gpu_peers(count, apart)


def judge_gpu_peers(count: int, apart: Sequence[tuple[int, int]]) -> Finding:
    """`apart` lists the pairs in which the first GPU cannot read the second one's memory."""
    if count < 2:
        return ok("fewer than two usable GPUs: no GPU has to reach another one")
    if not apart:
        return ok(f"each of {count} GPUs reads the memory of each other one")
    named = ", ".join(f"{one} → {other}" for one, other in apart[:6]) + (" …" if len(apart) > 6 else "")
    return warn(
        f"{len(apart)} of {count * (count - 1)} ways between GPUs pass through host memory: {named}",
        "look at nvidia-smi topo -m: put a node's ranks on GPUs that reach each other; in a virtual machine or with PCIe's ACS "
        "switched on none do",
    )


# --- clocks


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),  # more than any kernel writes
    )


def kernel_clock() -> tuple[bool, int]:
    """Returns whether this machine's clock is synchronised, and its largest error in microseconds. Raises OSError."""
    timex = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(timex)) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return not timex.status & _UNSYNCHRONISED, timex.maxerror


def check_clock(is_kept: bool, error_us: int) -> Finding:
    if is_kept and error_us < _MICROSECONDS_OF_ANY_CLOCK:
        return ok(f"kept in time, to within {error_us / 1000:.0f} ms")
    return warn(
        "nothing keeps this machine's clock in time"
        if not is_kept
        else f"this machine's clock may be wrong by {error_us / 1e6:.1f} s",
        "run chrony, systemd-timesyncd or ntpd on the machine itself: lines of logs from several machines are put in order by it, "
        "and certificates are valid by it; no decision about requests depends on it",
    )


# --- ports


def check_spread(pools: Sequence[str], hosts: Sequence[str]) -> Finding:
    """`pools` are the pools whose nodes have ranks on several machines."""
    what = f"nodes of {' and '.join(pools)} have ranks on several machines"
    if hosts:
        return ok(f"{what}: whether this one reaches the others is said of each")
    return warn(
        f"{what}, and no other one is named",
        "name them (tandem doctor --reach HOST): ranks reach each other at ports that the system chooses, in every step, and each "
        "machine must find the same model",
    )


def probed_ports(range_file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> list[int]:
    """Returns Ray's ports, and three from the range of which the system chooses ports."""
    words = read_text(range_file).split() or ["32768", "60999"]
    low, high = int(words[0]), int(words[-1])
    return [*_RAY_PORTS, low, (low + high) // 2, high]


def check_reach(host: str, ports: Sequence[int], within_s: float = _CONNECT_S) -> Finding:
    """Connects to another machine's ports. A refused connection counts as reached: nothing may be listening there yet."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return fail(f"{host} does not resolve: {error.strerror}", "name an address")
    with ThreadPoolExecutor(max_workers=len(ports)) as pool:
        problems = list(pool.map(lambda port: _why_unreached(str(address), port, within_s), ports))
    unreached = {port: why for port, why in zip(ports, problems, strict=True) if why}
    if not unreached:
        return ok(f"reached on each of the TCP ports {', '.join(map(str, ports))}")
    named = ", ".join(f"{port} ({why})" for port, why in unreached.items())
    return fail(
        f"not reached on {'any port' if len(unreached) == len(ports) else 'some TCP ports'}: {named}",
        "open all TCP ports between the cluster's machines, and to those alone: Ray and Tandem let the system choose most of theirs; "
        "manifests/firewall/tandem.nft has the rules",
    )


def _why_unreached(address: str, port: int, within_s: float) -> str:
    """Returns why the port is not reached; "" if the machine answers, even with a refusal."""
    try:
        socket.create_connection((address, port), within_s).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return "" if error.errno == errno.ECONNREFUSED else error.strerror or str(error)
    return ""
