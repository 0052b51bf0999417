"""The programs besides Python packages that tests need. Installs the missing ones where that is allowed, and names them otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

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


def absent_packages(tools: Mapping[str, str]) -> list[str]:
    return sorted({package for tool, package in tools.items() if shutil.which(tool, path=_PATH) is None})


def install_absent(tools: Mapping[str, str] = TOOLS, what: str = "the lab") -> None:
    """Installs the missing tools. Raises ToolsMissing with the packages' names if some are still missing. `what` needs them."""
    packages = absent_packages(tools)
    if not packages:
        return
    said = _apt("update") + _apt("install", "--yes", "--no-install-recommends", *packages)
    if still := absent_packages(tools):
        raise ToolsMissing(
            f"{what} needs {', '.join(still)}, and they could not be installed: install them with this "
            f"machine's package manager\n{said[-2000:]}"
        )


def _apt(*words: str) -> str:
    if shutil.which("apt-get") is None:
        return "there is no apt-get here\n"
    try:
        done = subprocess.run(
            ["apt-get", "--quiet", *words],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_INSTALL_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"apt-get {words[0]} did not end within {_INSTALL_S:.0f} s\n"
    return done.stdout
