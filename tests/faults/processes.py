"""Finds the processes of a run's nodes and routers."""

from __future__ import annotations

import os
import signal

import psutil

_ACTORS = {"prefill": "ray::PrefillActor", "decode": "ray::DecodeActor", "router": "ray::RouterActor"}


def actors(kind: str) -> list[psutil.Process]:
    """The processes of this run's Ray actors of one kind, the oldest first."""
    found = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if process.name().startswith("ray::") and " ".join(process.cmdline()).startswith(_ACTORS[kind]):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.create_time())


def busiest(kind: str) -> psutil.Process:
    """The process that computes the most: the node that serves a single request."""
    candidates = actors(kind)
    assert candidates, f"no process of kind {kind}"
    for process in candidates:
        process.cpu_percent()
    psutil.cpu_percent(interval=0.15)
    return max(candidates, key=lambda process: process.cpu_percent())


def send(process: psutil.Process, number: signal.Signals) -> None:
    os.kill(process.pid, number)
