"""The programs besides Python packages that tests need. Installs the missing ones where that is allowed, and names them otherwise."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest

TOOLS = {  # of a lab of several hosts, each with Debian's package
    "ip": "iproute2",
    "tc": "iproute2",
    "ss": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "flock": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "rsync": "rsync",
    "pgrep": "procps",
}
# Daemons live where an ordinary user's PATH does not look.
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
_INSTALL_S = 300.0
_LOCK = Path(tempfile.gettempdir(), "tandem-tests-install.lock")  # one installation at a time


class ToolsMissing(RuntimeError):
    """Tools are missing that this machine could have."""


def why_impossible() -> str:
    """Why this machine cannot run a lab, whatever is installed; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False
    )
    if trial.returncode:
        return f"namespaces are not allowed here: {trial.stderr.decode(errors='replace').strip()}"
    return ""


def lab_or_skip() -> None:
    """Leaves the test out unless labs are asked for and possible here. Missing tools that could be installed are a failure."""
    if os.environ.get("TANDEM_TEST_HOSTS") != "1":
        pytest.skip("takes minutes and several machines' worth of processes: `make test-hosts` runs it")
    if reason := why_impossible():
        pytest.skip(reason)
    install_absent()


def absent_packages(tools: Mapping[str, str]) -> list[str]:
    return sorted({package for tool, package in tools.items() if shutil.which(tool, path=_PATH) is None})


def install_absent(tools: Mapping[str, str] = TOOLS, what: str = "the lab") -> None:
    """Installs the missing tools. Raises ToolsMissing with the packages' names if some are still missing. `what` needs them."""
    if not absent_packages(tools):
        return
    said = ""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = absent_packages(tools)  # another test may have installed them
        if packages:
            said = _said(lock, "dpkg", "--configure", "-a")  # an installation that was cut off stops every later one
            said += _said(lock, "apt-get", "--quiet", "update")
            said += _said(lock, "apt-get", "--quiet", "install", "--yes", "--no-install-recommends", *packages)
    if still := absent_packages(tools):
        raise ToolsMissing(
            f"{what} needs {', '.join(still)}, and they could not be installed: install them with this "
            f"machine's package manager\n{said[-2000:]}"
        )


def _said(lock: IO[str], program: str, *words: str) -> str:
    """It is never killed, not even with the test, and the lock is its own as well: a killed one leaves packages half installed."""
    if shutil.which(program) is None:
        return f"there is no {program} here\n"
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen(
            [program, *words],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            pass_fds=(lock.fileno(),), start_new_session=True,
        )  # fmt: skip
        try:
            running.wait(_INSTALL_S)
        except subprocess.TimeoutExpired:
            return f"{program} {' '.join(words)} did not end within {_INSTALL_S:.0f} s\n"
        output.seek(0)
        return output.read()
