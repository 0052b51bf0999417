"""The connectors of the tree."""

from __future__ import annotations

from tandem.base.wings import is_there
from tandem.kvtransfer.registry import CONNECTORS

# Each of its wings may be deleted.
NAMES = [name for name, path in CONNECTORS.items() if is_there(path.partition(":")[0])]
WAYS = [(name, direction) for name in NAMES for direction in ("push", "pull")]
