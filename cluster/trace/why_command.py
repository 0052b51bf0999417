"""Where `tandem why` finds what is known of a request: its trace, or what its router kept of the last and the slowest ones."""

from __future__ import annotations

from tandem.cluster.trace.command import TraceClient
from tandem.cluster.trace.why import Explanation, explain, explain_account
from tandem.router.recent import Targets
from tandem.wire.errors import RequestError


def explained(client: TraceClient, name: str) -> Explanation:
    """Raises RequestError when nothing is known of it."""
    try:
        return explain(client.find(name))
    except RequestError as not_traced:
        try:
            state = client.state()
        except RequestError:
            raise not_traced from None  # a tenant's key: only traces are its own to see
        targets = Targets(state.ttft_s, state.inter_token_s)
        accounts = [*reversed(state.latest), *(slow.account for slow in state.slowest)]
        for account in accounts:
            if account.request_id == name:
                return explain_account(account, targets)
        raise RequestError(
            f"{name!r} is not among the last {len(state.latest)} requests of {client.url}, nor among the slowest of the last ten "
            f"minutes, and was not traced"
        ) from not_traced
