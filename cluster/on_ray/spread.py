"""A node whose ranks are on several machines: one placement group with a bundle on each of them, and one actor on each machine
but the first, which keeps the ranks there."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.base.errors import InternalError, Unavailable
from tandem.base.logs import LogPosition, begin_logging, recent_page
from tandem.cluster.models.store import find_model_here
from tandem.cluster.on_ray.ending import PoliteEnd
from tandem.node.config import NodeConfig
from tandem.node.wings import ranks_wing
from tandem.wire.sockets import raise_descriptor_limit

logger = logging.getLogger(__name__)

_NODE_ID = "ray.io/node-id"  # the label that Ray gives each of its nodes
_ROUND_S = 3600.0  # one wait for the ranks' end; it is repeated
# For rank 0 to tell the controller why the node ended: Ray only reports that a process died
_LAST_WORDS_S = 2.0


def group_of(node_id: str, namespace: str) -> str:
    """The name of a node's placement group, unique in the Ray cluster."""
    return f"{namespace}:{node_id}"


class NodePlacementGroup:
    """Ray's placement group of one node, with a bundle on each machine. Ray reserves all bundles or none. The group is
    detached, so it outlives the process that reserved it. Every method waits for Ray's control store and raises Unavailable
    when it does not answer."""

    def __init__(self, name: str, bundle: Mapping[str, float], machines: Sequence[str]) -> None:
        """`name` must be unique in the Ray cluster. `machines` are ids of Ray nodes."""
        self._name = name
        self._bundle = dict(bundle)
        self._machines = machines
        self._group: PlacementGroup | None = None

    def reserve(self) -> None:
        """Reserves the bundles. An earlier group of this name is removed first, and Ray kills what runs in it."""
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
            raise InternalError(f"the placement group {self._name} was used before it was reserved")
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=machine)

    def give_back(self) -> None:
        """Removes the group. Ray kills what still runs in it."""
        with _asking_ray():
            for number, group in placement_group_table().items():
                if group["name"] == self._name and group["state"] != "REMOVED":
                    remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(number))))


@contextlib.contextmanager
def _asking_ray() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray's own, and gRPC's
        raise Unavailable(f"Ray's control store did not change the placement group: {error}") from error


@ray.remote(max_concurrency=8, max_restarts=0)
class RanksActor:
    """Runs the keeper of a node's ranks on one of its other machines. Its process ends when the ranks have ended."""

    def __init__(self, config: bytes, machine: int) -> None:
        settings = msgspec.msgpack.decode(config, type=NodeConfig)
        begin_logging(settings.logs, f"{settings.node_id}-machine{machine}")
        raise_descriptor_limit()
        logger.info("keeps the ranks of %s on its machine %d", settings.node_id, machine)
        self._keeper = ranks_wing().keep(settings, machine, find_model_here)
        self._end = PoliteEnd(self._keeper.stop)
        threading.Thread(target=self._end_with_ranks, name="end-with-ranks", daemon=True).start()

    def _end_with_ranks(self) -> None:
        while not self._keeper.hold(_ROUND_S):
            pass
        self._keeper.stop()
        time.sleep(_LAST_WORDS_S)
        os._exit(0)

    def open(self, lead: str) -> str:
        return self._keeper.open(lead)

    def log_page(self, seen: tuple[str, int] | None, last: int, most: int) -> bytes:
        """Returns a LogPage of this process's log: the lines after one that was seen, or the last ones."""
        return msgspec.msgpack.encode(recent_page(LogPosition(*seen) if seen is not None else None, last, most))

    def hold(self, timeout_s: float) -> bool:
        """Returns False after this long. The controller learns that the actor has ended because the call fails."""
        threading.Event().wait(timeout_s)
        return False
