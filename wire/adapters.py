"""The identity that all processes give a LoRA adapter: its name and its content's digest, in one string.

KV that was computed with an adapter differs from the model's own, and from that of an adapter with the same name and
other weights. So every request, block hash, handoff and event carries the identity, and never the name alone.
"""

from __future__ import annotations

import re

from tandem.base.errors import ConfigurationError

MISTAKES_SHOWN = 3
MOST_ADAPTERS = 1000  # of one cluster: each node lists its adapters in every status
_NAME = re.compile(r"[\w.:/-]{1,128}")
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w.-][\w./-]*)?")
_DIGITS = 32  # hexadecimal digits of the digest: enough that two contents never share them


def identity_of(name: str, digest: str) -> str:
    return f"{name}@{digest[:_DIGITS]}"


def name_of(identity: str) -> str:
    return identity.rpartition("@")[0] or identity


def check_name(name: str) -> None:
    """Raises ConfigurationError for a name that a request's `model` cannot choose."""
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"an adapter cannot be called {name[:200]!r}: a name is of letters, digits and . : / _ -, at most 128 of them"
        )


def may_be_on_hub(where: str) -> bool:
    """Whether it has the form owner/name, with or without a revision."""
    return _ON_HUB.fullmatch(where) is not None


def check_place(name: str, where: str) -> None:
    """Raises ConfigurationError for a place that may differ between machines or working folders. Reads nothing."""
    if not where.startswith("/") and (where.startswith((".", "~")) or not may_be_on_hub(where)):
        raise ConfigurationError(
            f"the adapter {name[:200]!r}: {where[:200]!r} must be a folder's whole path, as every node can read it, or owner/name on the "
            "Hugging Face hub"
        )
