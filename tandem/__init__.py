"""The name that Tandem is imported by. Each package lies in the folder of its name at the repository's root; this folder
holds a link to each, so that a user's own `engine.py` or `router/` is never taken for ours."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """`__version__`, which is looked up when it is asked for: that reads a file."""
    if name == "__version__":
        from importlib.metadata import version

        return version("tandem-serve")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
