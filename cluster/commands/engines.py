"""What computes models: Tandem's own engine, and others with the environment that each needs."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.cluster.models.store import find_model
from tandem.cluster.settings.combined import SettingsError
from tandem.engine.config import OWN_ENGINE, ModelConfig
from tandem.engine.wings import EngineFound, other_engine, other_engines


def engines_found(python: str) -> list[EngineFound]:
    """All engines. Those besides Tandem's own are looked for in the environment of this Python."""
    model = ModelConfig(engine_python=python)
    own = EngineFound(name=OWN_ENGINE, python=sys.executable, version=importlib.metadata.version("tandem-serve"))
    return [own, *(other.look(model, {}) for other in other_engines().values())]


def show(found: Sequence[EngineFound]) -> str:
    lines = []
    for engine in found:
        where = f", {engine.python} for {engine.device}" if engine.device else ""
        lines.append(f"{engine.name:8} {engine.version or 'not there'}{where}")
        lines += [f"         → {why}" for why in engine.wrong]
    return "".join(f"{line}\n" for line in lines)


def check_engine(config: TandemConfig) -> EngineFound | None:
    """Returns the engine that nodes will run, None for Tandem's own. Raises SettingsError with every reason why they could not."""
    other = other_engine(config.model.engine)
    if other is None:
        return None
    found = other.look(_with_all_args(config), _environment(config))
    wrong = list(found.wrong)
    device = config.model.device
    if found.device == "cpu" and device.startswith("cuda"):
        wrong.append(
            f"model.device is {device}, and {found.python} has a build for CPUs: set it to cpu, or install another build"
        )
    try:
        model = find_model(config.model.path)
    except ConfigurationError:
        model = None  # other checks report it
    if model is not None:
        resolved = msgspec.structs.replace(config.engine, model=msgspec.structs.replace(config.model, path=model.path))
        wrong += [f"{name} {why}" for name, why in other.refusals(resolved) if name == "model.path"]
    if wrong:
        raise SettingsError(wrong)
    return found


def _with_all_args(config: TandemConfig) -> ModelConfig:
    """The model with the arguments of every pool: only their names are looked at."""
    pools = (config.pools.aggregated, config.pools.prefill, config.pools.decode)
    args = {name: value for pool in pools for name, value in pool.engine_args.items()}
    return msgspec.structs.replace(config.model, engine_args={**config.model.engine_args, **args})


def _environment(config: TandemConfig) -> dict[str, str]:
    """Variables of the pools that serve. Where they differ, the last pool's: a node checks again when it starts."""
    return {
        name: value
        for pool in (config.pools.aggregated, config.pools.prefill, config.pools.decode)
        if pool.last_size
        for name, value in pool.env.items()
    }
