"""What a router's page shows, for the commands that ask for it."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.router.page_state import PageState, RouterState
from tandem.router.recent import SlowRequest
from tests.router.test_router_recent import QUICK


def state() -> PageState:
    router = RouterState("m", "1", "least_wait", None, False, 0, 0, 9, 9, 0, 0.0, None)
    slow = SlowRequest(msgspec.structs.replace(QUICK, request_id="slow"), 2.0, "a node's line")
    return PageState(1.0, router, 2.0, 0.1, [], [], [], [QUICK], [slow])


def page_with(**router: Any) -> PageState:
    """A page whose router has these fields."""
    shown = state()
    return msgspec.structs.replace(shown, router=msgspec.structs.replace(shown.router, **router))
