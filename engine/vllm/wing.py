"""vLLM, as the rest of Tandem knows it."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.progress import Report
from tandem.engine.config import EngineConfig, ModelConfig
from tandem.engine.contract import NodeEngine
from tandem.engine.vllm import settings
from tandem.engine.vllm.look import PACKAGES, version_of
from tandem.engine.wings import Connect, EngineFound

NAME = "vllm"
TRIED = ("0.32.0",)  # the versions that the tests ran with: its inner classes change with every one
# What a node imports besides vLLM's own requirements.
NEEDED = ("ray", "nixl", "zmq", "xxhash", "cbor2", "httpx", "rich", "yaml", "tandem")
_LOOK_S = 60.0

refusals = settings.refusals


class _Told(msgspec.Struct):
    """What look.py prints."""

    python: str
    vllm: str
    torch: str
    ray: str
    missing: list[str]
    arguments: list[str]


def look(model: ModelConfig, env: Mapping[str, str]) -> EngineFound:
    if not model.engine_python:
        return EngineFound(
            name=NAME,
            python="",
            wrong=[
                "model.engine_python is empty: name the Python of an environment that has vLLM, such as /opt/vllm/bin/python"
            ],
        )
    try:
        told = _ask(model.engine_python, env)
    except ConfigurationError as error:
        return EngineFound(name=NAME, python=model.engine_python, wrong=[str(error)])
    return EngineFound(
        name=NAME,
        python=model.engine_python,
        version=told.vllm,
        device=("cpu" if told.torch.endswith("+cpu") else "cuda") if told.vllm else "",
        wrong=list(_wrong(told, model)),
    )


def _wrong(told: _Told, model: ModelConfig) -> Iterator[str]:
    python = model.engine_python
    if not told.vllm:
        yield f"{python} has no vLLM: install vllm=={TRIED[-1]} there"
        return
    if told.vllm.partition("+")[0] not in TRIED:
        yield f"{python} has vLLM {told.vllm}, and Tandem was tried with {', '.join(TRIED)}: install one of these there"
    if told.python.rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
        yield f"{python} is Python {told.python}, and Ray's processes must all have the minor version of this one, {platform.python_version()}"
    ours = importlib.metadata.version("ray")
    if "ray" in told.missing or told.ray != ours:
        yield f"{python} has {f'Ray {told.ray}' if told.ray else 'no Ray'}, and this cluster has {ours}: {python} -m pip install 'ray[default]=={ours}'"
    if "tandem" in told.missing:
        yield f"{python} does not find Tandem itself: install it there with --no-deps, or put it on PYTHONPATH"
    if others := [name for name in told.missing if name not in ("ray", "tandem")]:
        yield f"{python} lacks {', '.join(others)}: {python} -m pip install -r {Path(__file__).parent / 'requirements.txt'}"
    for name in model.engine_args:
        if name not in told.arguments:
            yield f"model.engine_args has {name!r}, which vLLM {told.vllm} does not know{_meant(name, told.arguments)}"


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _ask(python: str, env: Mapping[str, str]) -> _Told:
    """Raises ConfigurationError if this is no Python that answers."""
    command = [python, str(Path(__file__).parent / "look.py"), json.dumps(NEEDED)]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOOK_S, check=False, env={**os.environ, **env}
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"model.engine_python: {python} did not answer within {_LOOK_S:.0f} s") from None
    except OSError as error:
        raise ConfigurationError(f"model.engine_python: {python} cannot be run: {error.strerror}") from None
    try:
        return msgspec.json.decode(ended.stdout.strip().rpartition("\n")[2], type=_Told)
    except msgspec.DecodeError:
        said = (ended.stderr.strip() or ended.stdout.strip() or "nothing").splitlines()[-1][:200]
        raise ConfigurationError(f"model.engine_python: {python} is no Python that answers; it said: {said}") from None


def make(config: EngineConfig, model: ModelConfig, progress: Report, connect: Connect | None) -> NodeEngine:
    version = version_of(*PACKAGES)
    if not version:
        raise ConfigurationError("model.engine is vllm, and the Python of this node has none: set model.engine_python")
    if version.partition("+")[0] not in TRIED:
        raise ConfigurationError(f"vLLM {version} is there, and Tandem was tried with {', '.join(TRIED)}")
    from tandem.engine.vllm.loading import load

    return load(config, model, progress, connect)
