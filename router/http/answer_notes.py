"""What the log and an answer's headers say of the nodes that worked on it."""

from __future__ import annotations

from tandem.router.dispatch import Generation

LOGGED_IDS = 8


def notes_of(generation: Generation, tokens: int) -> str:
    """Returns the notes for the request's line in the log."""
    failovers = sum(life.failovers for life in generation.lives)
    return f" nodes={_nodes(generation)} tokens={tokens} failovers={failovers} requests={_node_requests(generation)}"


def _node_requests(generation: Generation) -> str:
    """Returns the first LOGGED_IDS of the ids under which the nodes know the request."""
    names = generation.lives[0].request_ids
    if len(generation.lives) > 1:
        names = [name for life in generation.lives for name in life.request_ids]
    more = len(names) - LOGGED_IDS
    return ",".join(names[:LOGGED_IDS]) + (f",… and {more} more" if more > 0 else "")


def _nodes(generation: Generation) -> str:
    """Returns every attempt's nodes in order. Choices with the same nodes are named once."""
    first = generation.lives[0].decisions
    if len(generation.lives) == len(first) == 1:
        return first[0].node_names
    ways = ["|".join([decision.node_names for decision in life.decisions]) for life in generation.lives]
    return ";".join(dict.fromkeys(ways))


def routing_headers(generation: Generation) -> list[tuple[bytes, bytes]]:
    reasons = dict.fromkeys([life.decisions[-1].reason for life in generation.lives if life.decisions])
    return [
        (b"x-tandem-nodes", _header_value(_nodes(generation))),
        (b"x-tandem-decision", _header_value("; ".join(reasons))),
    ]


def _header_value(text: str) -> bytes:
    """Cuts a value to a kilobyte. It strips a space at the cut, because a header must not end in one."""
    return text.encode("ascii", "replace")[:1024].strip()
