"""The name that Tandem is imported by. Each package lies in the folder of its name at the repository's root; this folder
holds a link to each, so that a user's own `engine.py` or `router/` is never taken for ours.

`from tandem import LLM, SamplingParams`: a model in a Python program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.cluster.offline.llm import LLM
    from tandem.cluster.offline.params import LlmSampling as SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__: str


def __getattr__(name: str) -> Any:
    """What is looked up when it is asked for: that reads files, and imports a client."""
    if name == "__version__":
        from importlib.metadata import version

        return version("tandem-serve")
    if name == "LLM":
        from tandem.cluster.offline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tandem.cluster.offline.params import LlmSampling

        return LlmSampling
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
