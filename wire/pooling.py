"""How a model's hidden states become one vector."""

from __future__ import annotations

import enum

import msgspec


class PoolingKind(enum.StrEnum):
    MEAN = "mean"  # the mean over all tokens
    LAST = "last"  # the last token's
    CLS = "cls"  # the first token's


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a vector is made. A node says what its model is made for, and a request says what its client wants; there the
    router sets only `dimensions`, because everything else is the model's."""

    kind: PoolingKind
    normalize: bool = True  # the vector's length is 1
    # Only this many of its first numbers, for Matryoshka models; None: all.
    dimensions: int | None = None


class VectorModel(msgspec.Struct, frozen=True):
    """What routers must know of a model that makes vectors."""

    pooling: Pooling
    size: int  # numbers in a vector
    generates: bool = True  # False: its checkpoint has no head that chooses tokens, so it makes vectors only
