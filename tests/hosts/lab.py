"""A lab of several hosts on one machine: namespaces joined by a bridge, each with its own processes, home, shared memory, Ray folder
and sshd. A program on a host sees only that host's processes, so even `ray stop` is safe.

It needs root and the programs that tools.py names. It changes nothing outside the namespaces, except that it creates /run/sshd if that
is missing.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"
LAPTOP = f"{NETWORK}.2"
# Commands of the environment that the tests run in, whatever is on a PATH.
RAY = (sys.executable, "-m", "ray.scripts.scripts")
TANDEM = (sys.executable, "-m", "tandem.cluster.cli")
_PREFIX = "tdm"
_LAN = f"{_PREFIX}_lan"
_LOCK = Path("/run/lock/tandem-hosts.lock")


class Host:
    """A host of the lab. Commands run there as root, with the tests' Python on the PATH."""

    def __init__(self, lab: Lab, name: str, address: str) -> None:
        self._lab = lab
        self.name = name
        self.address = address
        self.folder = lab.folder / name
        self.home = self.folder / "home"
        self._root_process: subprocess.Popen[bytes] | None = None

    @property
    def netns(self) -> str:
        return f"{_PREFIX}_{self.name}"

    @property
    def port(self) -> str:
        """This host's port on the bridge that joins the hosts."""
        return f"v_{self.name}"

    def boot(self) -> None:
        for folder in (self.home / ".ssh", self.folder / "ray"):
            folder.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        (self.home / ".ssh").chmod(0o700)
        if self._lab.ssh:
            shutil.copy(self._lab.key.with_suffix(".pub"), self.home / ".ssh" / "authorized_keys")
        with (self.folder / "sshd.log").open("ab") as log:
            self._root_process = subprocess.Popen(
                ["ip", "netns", "exec", self.netns, "unshare", "--mount", "--pid", "--fork", "--kill-child",
                 "--mount-proc", "--uts", "--ipc", "sh", "-ec", self._init_script()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _init_script(self) -> str:
        sshd = " ".join(
            f"-o {option}"
            for option in (
                f"ListenAddress={self.address}", f"HostKey={self._lab.host_key}", "PidFile=none", "UsePAM=no",
                "PermitRootLogin=prohibit-password", "StrictModes=no", "MaxStartups=100",
            )
        )  # fmt: skip
        return f"""
            hostname {self.name}
            mount -t tmpfs -o size=2g tmpfs /dev/shm
            mkdir -p /tmp/ray; mount --bind {self.folder}/ray /tmp/ray
            {self._boot_id()}
            {private_home(self.home, self.folder)}
            exec {f"/usr/sbin/sshd -D -e -f /dev/null {sshd}" if self._lab.ssh else "sleep infinity"}
        """

    def _boot_id(self) -> str:
        if not self._lab.boot_ids:
            return ""
        file = self.folder / "boot_id"
        file.write_text(f"{uuid.uuid4()}\n")
        return f"mount --bind {file} /proc/sys/kernel/random/boot_id"

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` on this host, in its process namespace."""
        assert self._root_process is not None, "boot() comes first"
        inner = _only_child(self._root_process.pid)
        return ["nsenter", "--target", str(inner), "--net", "--mount", "--pid", "--uts", "--ipc", "--",
                "env", *self._lab.environment(), *words]  # fmt: skip

    def run(self, *words: str, timeout_s: float = 60.0) -> str:
        return _checked(self.command(*words), timeout_s)

    def processes_outside(self) -> list[int]:
        """The ids of its processes, in this machine's numbering."""
        return [int(pid) for pid in _ip("netns", "pids", self.netns).split()]

    def cut_off(self) -> None:
        _ip("-n", _LAN, "link", "set", self.port, "down")

    def heal(self) -> None:
        _ip("-n", _LAN, "link", "set", self.port, "up")

    def power_off(self) -> None:
        """Kills all of its processes at once."""
        if self._root_process is not None:
            self._root_process.kill()
            self._root_process.wait(timeout=10)
            self._root_process = None


class Lab:
    """Use it as `with Lab(folder, hosts=5) as lab:`. `lab.hosts` are the hosts, and `lab.laptop` is outside them.

    Without `ssh` the hosts have no sshd, and only `Host.run` reaches them. With `boot_ids` each has its own boot id, as real machines
    have; without it programs may take the hosts for containers of one machine."""

    def __init__(self, folder: Path, hosts: int, *, ssh: bool = True, boot_ids: bool = False) -> None:
        self.folder = folder
        self.ssh = ssh
        self.boot_ids = boot_ids
        self.key = folder / "key"
        self.host_key = folder / "host_key"
        self.hosts = [Host(self, f"h{index}", f"{NETWORK}.{10 + index}") for index in range(hosts)]
        self.laptop_home = folder / "laptop" / "home"
        self._lock: IO[bytes] | None = None

    def environment(self) -> list[str]:
        path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return ["-i", f"PATH={path}", f"PYTHONPATH={ROOT}", f"HOME={_home_of_root()}", "USER=root", "LANG=C.UTF-8",
                "TERM=dumb"]  # fmt: skip

    def __enter__(self) -> Lab:
        self._lock = _LOCK.open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError("another lab is up on this machine: two would take each other's names") from error
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        _sweep()
        if self.ssh:
            Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("ray", "tmp"):
            (self.folder / "laptop" / name).mkdir(parents=True, exist_ok=True)
        (self.laptop_home / ".ssh").mkdir(parents=True, exist_ok=True)
        for key in (self.key, self.host_key) if self.ssh else ():
            if not key.exists():
                _checked(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], 10)
        _ip("netns", "add", _LAN)
        _ip("-n", _LAN, "link", "add", "br0", "type", "bridge")
        _ip("-n", _LAN, "link", "set", "br0", "up")
        _join("cli", LAPTOP)
        for host in self.hosts:
            _join(host.name, host.address)
            host.boot()
        if self.ssh:
            for host in self.hosts:
                self._wait_for_sshd(host)

    def _wait_for_sshd(self, host: Host, within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while True:
            try:
                self.on_laptop(
                    "ssh", "-i", str(self.key), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new",
                    f"root@{host.address}", "true", timeout_s=10,
                )  # fmt: skip
                return
            except (AssertionError, subprocess.TimeoutExpired):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)  # nothing tells us when another process listens

    def laptop_command(self, *words: str) -> list[str]:
        setup = f"mkdir -p /tmp/ray; mount --bind {self.folder}/laptop/ray /tmp/ray\n"
        setup += private_home(self.laptop_home, self.folder / "laptop")
        return ["ip", "netns", "exec", f"{_PREFIX}_cli", "unshare", "--mount", "--pid", "--fork", "--kill-child",
                "--mount-proc", "env", *self.environment(), f"TMPDIR={self.folder}/laptop/tmp", "sh", "-ec", f'{setup}\nexec "$@"', "sh", *words]  # fmt: skip

    def on_laptop(self, *words: str, timeout_s: float = 60.0) -> str:
        """Runs a command on the operator's machine, which reaches the hosts and is not one of them."""
        return _checked(self.laptop_command(*words), timeout_s)

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.power_off()
        _sweep()
        if self._lock is not None:
            self._lock.close()


def private_home(home: Path, scratch: Path) -> str:
    """A shell command that gives a process its own home, in which the files that the tests run from keep their paths."""
    root_home = _home_of_root()
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}
    hidden = sorted(path for path in needed if path.is_relative_to(root_home))
    lines = []
    for index, path in enumerate(hidden):
        lines.append(f"mkdir -p {scratch}/keep{index}; mount --bind {path} {scratch}/keep{index}")
    lines.append(f"mount --rbind {home} {root_home}")
    for index, path in enumerate(hidden):
        lines.append(f"mkdir -p {path}; mount --bind {scratch}/keep{index} {path}")
    return "\n".join(lines)


def _home_of_root() -> str:
    return pwd.getpwuid(0).pw_dir


def _join(name: str, address: str) -> None:
    netns, port = f"{_PREFIX}_{name}", f"v_{name}"
    _ip("netns", "add", netns)
    _ip("-n", _LAN, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", netns)
    _ip("-n", _LAN, "link", "set", port, "master", "br0", "up")
    _ip("-n", netns, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", netns, "link", "set", "eth0", "up")
    _ip("-n", netns, "link", "set", "lo", "up")


def _sweep() -> None:
    """Ends the processes left in our namespaces, including those of a lab whose test was killed."""
    names = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(f"{_PREFIX}_")]
    for name in names:
        for pid in _ip("netns", "pids", name).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
    for name in names:
        _ip("netns", "delete", name)


def _only_child(pid: int, within_s: float = 10.0) -> int:
    """The id, in this machine's numbering, of process 1 of the namespace."""
    deadline = time.monotonic() + within_s
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} made no namespace within {within_s:.0f} s")
        time.sleep(0.01)  # nothing tells us when another process forks


def _ip(*words: str) -> str:
    return _checked(["ip", *words], 10)


def in_netns(host: Host, *words: str, check: bool = True) -> str:
    """Runs a command such as nft or tc in the host's network namespace only. Returns its output; "" if it fails and `check` is False."""
    return _in_named_netns(host.netns, *words, check=check)


def on_bridge(*words: str, check: bool = True) -> str:
    return _in_named_netns(_LAN, *words, check=check)


def _in_named_netns(name: str, *words: str, check: bool) -> str:
    try:
        return _checked(["ip", "netns", "exec", name, *words], 10)
    except AssertionError:
        if check:
            raise
        return ""


def _checked(command: Sequence[str], timeout_s: float) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command[-6:])}: exit status {done.returncode}\n{output}"
    return done.stdout
