"""Which cores threads run on. An affinity belongs to a thread, and a new one has that of the thread that made it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from tandem.wire.errors import ConfigurationError


def threads_here() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def bind(threads: Iterable[int], cores: Collection[int]) -> None:
    for thread_id in threads:
        try:
            os.sched_setaffinity(thread_id, cores)
        except ProcessLookupError:
            continue  # it ended meanwhile
        except OSError as error:
            raise ConfigurationError(f"cannot bind to cores {sorted(cores)}: {error}") from error
