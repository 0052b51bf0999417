"""Asks Ray and its actors. The only place that translates Ray's exceptions into Tandem's."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray import exceptions as ray_exceptions

from tandem.base.errors import InternalError, NodeLost, TandemError, Unavailable

T = TypeVar("T")


class ProcessUnreachable(Unavailable):
    """Ray could not reach the process, for example because a connection was reset. The process may be alive."""


def translated(error: ray_exceptions.RayError) -> TandemError:
    match error:
        case ray_exceptions.RayTaskError(cause=TandemError() as cause):
            return cause
        case ray_exceptions.RayTaskError(cause=cause):
            return InternalError(f"{type(cause).__name__}: {cause}")
        case ray_exceptions.ActorUnschedulableError():
            return Unavailable(f"no machine of the Ray cluster has room for this process: {_first_line(error)}")
        case ray_exceptions.ActorUnavailableError():
            return ProcessUnreachable(f"its process cannot be reached: {_broken_link(error)}")
        case ray_exceptions.RayActorError():
            return NodeLost(_last_words(error))
        case _:
            return Unavailable(f"Ray: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _broken_link(error: ray_exceptions.ActorUnavailableError) -> str:
    """Returns what gRPC said, out of Ray's message, which repeats itself and names an actor's number."""
    found = re.search(r"RPC error: (.+?) rpc_code", str(error))
    return found[1] if found else _first_line(error)


def _last_words(error: ray_exceptions.RayActorError) -> str:
    """Returns the cause of death from Ray's page-long message: the first sentences of its last line."""
    line = str(error).strip().splitlines()[-1]
    detail = line.rpartition("Worker exit detail: ")[2]
    return detail.partition(" Some common causes")[0].strip() or type(error).__name__


def find_actor(name: str, namespace: str) -> Any | None:
    """Returns None if Ray's control store has no such actor, so Ray will not restart one either. Blocks until it answers."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None
    except ray_exceptions.RayError as error:
        raise translated(error) from error


async def answer(ref: Awaitable[T]) -> T:
    """Awaits a call to an actor. Raises Tandem's errors in place of Ray's."""
    try:
        return await ref
    except ray_exceptions.RayError as error:
        raise translated(error) from error
