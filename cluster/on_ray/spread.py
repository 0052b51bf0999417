"""What a node has on several machines: a place on each of them, all or none, and a process on each that keeps its ranks there."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cluster.models.store import find_model_here
from tandem.cluster.on_ray.ending import PoliteEnd
from tandem.node.config import NodeConfig
from tandem.node.ranks.keeper import RankKeeper
from tandem.wire.errors import InternalError, Unavailable
from tandem.wire.logs import begin_logging
from tandem.wire.sockets import raise_descriptor_limit

_NODE_ID = "ray.io/node-id"  # Ray's label of each of its nodes
_NEVER_S = 3600.0
_LAST_WORDS_S = 2.0  # for rank 0 to tell the controller why the node ended, which Ray's word of a process's end does not say


class Places:
    """In one placement group of Ray's, with a bundle on each machine. It outlives the process that asked for it. Its methods wait for
    Ray's control store, and raise Unavailable."""

    def __init__(self, name: str, bundle: Mapping[str, float], machines: Sequence[str]) -> None:
        """`name`: no two groups of a cluster have the same. `machines`: as Ray names them."""
        self._name = name
        self._bundle = dict(bundle)
        self._machines = machines
        self._group: PlacementGroup | None = None

    def reserve(self) -> None:
        """Whatever had them under this name ends."""
        self.give_back()
        with _asking_ray():
            self._group = placement_group(
                [self._bundle] * len(self._machines),
                strategy="STRICT_SPREAD",
                name=self._name,
                lifetime="detached",
                bundle_label_selector=[{_NODE_ID: machine} for machine in self._machines],
            )

    def on(self, machine: int) -> PlacementGroupSchedulingStrategy:
        if self._group is None:
            raise InternalError(f"places of {self._name} that were not asked for")
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=machine)

    def give_back(self) -> None:
        """Ray ends what still runs there."""
        with _asking_ray():
            for number, group in placement_group_table().items():
                if group["name"] == self._name and group["state"] != "REMOVED":
                    remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(number))))


@contextlib.contextmanager
def _asking_ray() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray's own, and gRPC's
        raise Unavailable(f"Ray's control store does not give places: {error}") from error


@ray.remote(max_concurrency=8, max_restarts=0)
class RanksActor:
    """The ranks' keeper on another machine. Its process ends with them."""

    def __init__(self, config: bytes, machine: int) -> None:
        settings = msgspec.msgpack.decode(config, type=NodeConfig)
        begin_logging(settings.logs, f"{settings.node_id}-machine{machine}")
        raise_descriptor_limit()
        self._keeper = RankKeeper(settings, machine, find_model_here)
        self._end = PoliteEnd(self._keeper.stop)
        threading.Thread(target=self._end_with_ranks, name="end-with-ranks", daemon=True).start()

    def _end_with_ranks(self) -> None:
        while not self._keeper.hold(_NEVER_S):
            pass
        self._keeper.stop()
        time.sleep(_LAST_WORDS_S)
        os._exit(0)

    def open(self, lead: str) -> str:
        return self._keeper.open(lead)

    def hold(self, timeout_s: float) -> bool:
        """Only the end of the process answers sooner."""
        threading.Event().wait(timeout_s)
        return False
