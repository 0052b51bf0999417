"""Sends a load by Tandem's load generator, and keeps every request's timeline."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.loadgen.api import Api, RequestShape
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.load import LoadStream
from tandem.loadgen.workload import Session


async def played(
    url: str,
    shape: RequestShape,
    sessions: Sequence[Session],
    *,
    arrivals: Sequence[float] | None = None,
    users: int | None = None,
) -> LoadStream:
    """Sends each session at its time, or as soon as one of the users is free. Returns when all have ended."""
    async with HttpClient(Address.of_url(url)) as http:
        load = LoadStream("load", Api(http, shape), sessions, arrivals=arrivals, concurrency=users)
        await load.run()
    return load
