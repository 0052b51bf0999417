"""Ray on this machine: started for us, quiet, and gone with us."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from pathlib import Path
from types import ModuleType

from wire.errors import ConfigurationError, InternalError, Unavailable

NAMESPACE = "tandem"

# Tokens and blocks never travel through Ray; its object store carries configurations and status.
OBJECT_STORE_BYTES = 80 << 20

_ENVIRONMENT = {
    # Ray listens on every interface, so nobody without the token may talk to it. Never left to its default.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that asks Ray for no GPU still sees them: placement chooses the device.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def start_ray() -> Path:
    """A Ray of our own, whatever else runs here. Returns the folder of its logs.

    Call it from the main thread: Ray's processes end when the thread that started them does.
    """
    ray = import_ray()

    try:
        context = ray.init(
            address="local",  # never a cluster that RAY_ADDRESS happens to name
            namespace=NAMESPACE,
            num_cpus=0,  # no idle workers; placement counts the cores
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            logging_level="ERROR",
        )
    except (RuntimeError, OSError, ValueError, ConnectionError) as error:
        raise Unavailable(
            f"Ray did not start: {error}. `tandem doctor` looks for the reason; its logs are in /tmp/ray/session_latest/logs"
        ) from error
    return Path(context.address_info["session_dir"]) / "logs"


def stop_ray() -> None:
    """Idempotent, and quick when Ray was never started."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def import_ray() -> ModuleType:
    """Ray reads its environment while it is imported, so what we want of it must stand there before."""
    if "ray" in sys.modules and any(name not in os.environ for name in _ENVIRONMENT):
        raise InternalError("ray was imported before its environment was set: import it through import_ray")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(f"Ray cannot be imported: {error}; install the package ray again") from error


def ray_version() -> str:
    return importlib.metadata.version("ray")
