"""What a LoRA adapter is to all processes: its name and its content, in one string.

KV that was computed with an adapter is another than the model's own, and another than that of an adapter of the same name with other
weights. So every request, block hash, handoff and event carries the identity, and never the name alone.
"""

from __future__ import annotations

import re

from tandem.wire.errors import ConfigurationError

MISTAKES_SHOWN = 3
MOST_ADAPTERS = 1000  # of one cluster: each node says in every status which it has
_NAME = re.compile(r"[\w.:/-]{1,128}")
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w.-][\w./-]*)?")
_DIGITS = 32  # of the digest, in hexadecimal: two contents never share them


def identity_of(name: str, digest: str) -> str:
    return f"{name}@{digest[:_DIGITS]}"


def name_of(identity: str) -> str:
    return identity.rpartition("@")[0] or identity


def check_name(name: str) -> None:
    """Raises ConfigurationError for what cannot be chosen by a request's `model`."""
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"an adapter cannot be called {name[:200]!r}: a name is of letters, digits and . : / _ -, at most 128 of them"
        )


def may_be_on_hub(where: str) -> bool:
    """Whether it is in the shape of owner/name, with a revision or without."""
    return _ON_HUB.fullmatch(where) is not None


def check_place(name: str, where: str) -> None:
    """Refuses a place that does not mean the same on every machine and in every folder. Reads nothing. Raises ConfigurationError."""
    if not where.startswith("/") and (where.startswith((".", "~")) or not may_be_on_hub(where)):
        raise ConfigurationError(
            f"the adapter {name[:200]!r}: {where[:200]!r} must be a folder's whole path, as every node can read it, or owner/name on the "
            "Hugging Face hub"
        )
