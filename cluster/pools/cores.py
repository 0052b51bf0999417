"""Which cores of a machine each of its hosts may use. Several Ray nodes can share one machine (containers, pods, a
test's cluster): they must not compute on the same cores as long as there are enough. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec


class MachineFacts(msgspec.Struct, frozen=True):
    """What one Ray node says of the machine that it is on."""

    machine: str  # the same for all that share its cores
    cores: tuple[int, ...]  # those that may be used there, hardware threads of one core side by side
    gpus: int = 0
    quota: int | None = None  # it may use so many cores' time; None: that of all of them


def share_cores(
    found: Mapping[str, MachineFacts], given: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Cores for every host. What a host was given it keeps: a node that runs there is bound to it. Hosts that come
    to a machine together get equal parts of it; one that comes later gets as much, of what is used least."""
    shares = {name: given[name] for name in found if name in given}
    for machine in dict.fromkeys(one.machine for one in found.values()):
        here = [name for name, one in found.items() if one.machine == machine]
        used = Counter(core for name in here for core in shares.get(name, ()))
        new = [name for name in here if name not in shares]
        for position, name in enumerate(new):
            cores = found[name].cores
            size, odd = divmod(len(cores), len(here))
            size = max(1, size + (position < odd and len(new) == len(here)))
            size = min(size, found[name].quota or size)
            order = {core: index for index, core in enumerate(cores)}
            chosen = sorted(
                sorted(cores, key=lambda core: (used[core], order[core]))[:size], key=order.__getitem__
            )
            used.update(chosen)
            shares[name] = tuple(chosen)
    return shares
