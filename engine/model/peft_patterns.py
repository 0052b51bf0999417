"""Tries an adapter's regular expressions before this process matches them: one of thirty characters can take years, while no other thread
of a process goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from typing import Literal

import msgspec

from tandem.base.errors import ConfigurationError, Unavailable

CPU_S = 2  # the system counts whole seconds
_WALL_S = 60.0  # on a machine that has no time for it
_TRY = """
import json, re, resource, sys
limit, patterns, layers = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
for how, pattern in patterns:
    try:
        for layer in layers:
            getattr(re, how)(pattern, layer)
    except Exception:
        pass
"""

Pattern = tuple[Literal["match", "fullmatch"], str]
"""The function of `re` with which it is matched, and the expression."""


def try_patterns(about: str, patterns: Collection[Pattern], layers: Collection[str]) -> None:
    """Raises a ConfigurationError where matching all of them with all layers takes too long. What is no expression is for others to say."""
    if not patterns:
        return
    asked = msgspec.json.encode((CPU_S, list(patterns), list(layers)))
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-c", _TRY], input=asked, capture_output=True, check=False, timeout=_WALL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{about}: its patterns could not be tried ({error}): load it again") from error
    if ended.returncode < 0:
        raise ConfigurationError(
            f"{about}: the patterns of its adapter_config.json take more than {CPU_S} s to match, such as repetitions within "
            "repetitions: name the layers in a list instead"
        )
