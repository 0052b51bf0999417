"""Which file each tensor of a checkpoint of safetensors is in."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError, safe_open

from tandem.base.errors import ConfigurationError
from tandem.engine.model.content import weight_files
from tandem.engine.model.source import ModelSource


def open_tensors(source: ModelSource) -> dict[str, Any]:
    """Returns the open file of each tensor. Raises a ConfigurationError, also for a tensor that is in two files: readers would take the
    first or the last one, and nothing says which belongs to the model."""
    found: dict[str, Any] = {}
    homes: dict[str, str] = {}
    for path in weight_files(source):
        try:
            file: Any = safe_open(path, framework="pt")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"{source.name} cannot be loaded: {path} cannot be read: {error}") from error
        for name in names:
            if name in found:
                raise ConfigurationError(
                    f"{source.name} cannot be served: {name} is in {homes[name]} and in {path.name}: which of them belongs to the model is "
                    "not known. Fetch the model again into an empty folder"
                )
            found[name], homes[name] = file, path.name
    if not found:
        raise ConfigurationError(f"{source.name} cannot be loaded: there is no .safetensors file in its folder")
    return found
