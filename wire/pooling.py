"""How a model's hidden states become one vector."""

from __future__ import annotations

import enum

import msgspec


class PoolingKind(enum.StrEnum):
    MEAN = "mean"  # of all tokens
    LAST = "last"  # the last token's
    CLS = "cls"  # the first token's


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a model is made for, as its nodes say; and what one request asks for, as a router does. A router writes nothing but
    `dimensions`: all else is the model's."""

    kind: PoolingKind
    normalize: bool = True  # the vector's length is 1
    dimensions: int | None = (
        None  # so many of its first numbers, as Matryoshka models are trained for; None: all
    )


class VectorModel(msgspec.Struct, frozen=True):
    """What routers must know of a model that makes vectors."""

    pooling: Pooling
    size: int  # numbers in a vector
    generates: bool = True  # False: its checkpoint has nothing that chooses tokens, so it makes vectors only
