"""`tandem trace [REQUEST_ID]`, and where `tandem why` gets what is known of a request."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from tandem.base.errors import ConfigurationError, RequestError
from tandem.cluster import saving
from tandem.cluster.api_client import ApiClient
from tandem.cluster.trace.picture import draw_trace
from tandem.cluster.trace.text import show_list, show_trace
from tandem.cluster.trace.why import Explanation, explain, explain_account
from tandem.router.page_state import PageState
from tandem.router.recent import Targets
from tandem.router.tracing.record import TraceList, TraceRecord


def run(
    client: TraceClient,
    console: Console,
    name: str | None,
    picture: Path | None,
    json: Path | None,
    *,
    as_json: bool = False,
) -> int:
    if picture is not None:
        saving.check_picture(picture, "--picture")
    if name is None:
        if picture is not None or json is not None:
            raise ConfigurationError(
                "--picture and --json are for one request: give its id, as `tandem trace` lists it"
            )
        show_list(console, client.recent())
        return 0
    record = client.find(name)
    if as_json or json == Path("-"):
        sys.stdout.buffer.write(saving.as_json(record))
    else:
        show_trace(console, record)
    if json is not None and json != Path("-"):
        saving.write_json(record, json)
    if picture is not None:
        saving.save_picture(draw_trace(record), picture)
    return 0


# A prefill node reports when its transfer is confirmed, which can be a moment after the answer's end.
COMPLETE_WITHIN_S = 2.0
_ASK_AGAIN_S = 0.1


class TraceClient(ApiClient):
    def recent(self) -> TraceList:
        return self.read("/traces", TraceList)

    def find(self, name: str) -> TraceRecord:
        """Returns the trace. Waits up to 2 s for parts that nodes have not sent yet."""
        deadline = time.monotonic() + COMPLETE_WITHIN_S
        while True:
            record = self.read(f"/traces/{quote(name, safe='')}", TraceRecord)
            complete = record.ended is not None and not record.missing
            if complete or time.monotonic() > deadline:
                return record
            time.sleep(_ASK_AGAIN_S)

    def state(self) -> PageState:
        """Returns the state that the router's page shows. Needs an operator's key."""
        return self.read("/ui/state", PageState)


def explained(client: TraceClient, name: str) -> Explanation:
    """Explains a request by its trace; without one, by the router's account of it, which it keeps for its last and its slowest requests.
    Raises RequestError if nothing is known of it."""
    try:
        return explain(client.find(name))
    except RequestError as not_traced:
        try:
            state = client.state()
        except RequestError:
            raise not_traced from None  # a tenant's key reads its own traces only
        targets = Targets(state.ttft_s, state.inter_token_s)
        accounts = [*reversed(state.latest), *(slow.account for slow in state.slowest)]
        # What `tandem top` shows is the beginning of an id.
        exact = [account for account in accounts if account.request_id == name]
        for account in exact or [one for one in accounts if one.request_id.startswith(name)]:
            return explain_account(account, targets)
        raise RequestError(
            f"{name!r} is not among the last {len(state.latest)} requests of {client.url}, nor among the slowest of the last ten "
            "minutes, and was not traced. A request's id is in the x-request-id header of its answer; the id in its body is another"
        ) from not_traced
