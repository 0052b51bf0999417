"""How each phase of a trace is shown."""

from typing import NamedTuple

from tandem.wire.tracing import TracePhase


class ShownPhase(NamedTuple):
    what: str  # the request waited for
    style: str  # of its bar in the terminal
    color: str  # of its bar in a picture


# A moment that several phases cover is attributed to the first of them in this order.
PHASES: dict[TracePhase, ShownPhase] = {
    TracePhase.PREFILL: ShownPhase("computing the prompt", "blue", "#2f6fde"),
    TracePhase.DECODE: ShownPhase("computing the answer", "green", "#2e9e5b"),
    TracePhase.READ: ShownPhase("reading and checking the request", "white", "#9aa5b1"),
    TracePhase.TOKENIZE: ShownPhase("template and tokens", "white", "#7b8794"),
    TracePhase.WAIT: ShownPhase("in the router's line, for a place", "yellow", "#e6b800"),
    TracePhase.ROUTE: ShownPhase("choosing nodes and telling them", "white", "#52606d"),
    TracePhase.PREEMPTED: ShownPhase("in line again, after it lost its blocks", "red", "#c0392b"),
    TracePhase.STEP: ShownPhase("planning and booking steps", "white", "#d9e2ec"),
    TracePhase.QUEUE: ShownPhase("in the node's line", "yellow", "#e6b800"),
    TracePhase.INBOX: ShownPhase("until the step under way was over", "white", "#cbd2d9"),
    TracePhase.RESUME: ShownPhase("until the next step, after its KV arrived", "white", "#f0803c"),
    TracePhase.NOTICE: ShownPhase("the notice that all KV has arrived", "magenta", "#6c3483"),
    TracePhase.WRITE: ShownPhase("sending KV", "magenta", "#9b59b6"),
    TracePhase.REGISTER: ShownPhase("registering its blocks with the prefill node", "white", "#d6a2e8"),
    TracePhase.HANDSHAKE: ShownPhase("the handshake of the two nodes", "white", "#c8a2e8"),
    TracePhase.PLAN: ShownPhase("until the first KV could be sent", "white", "#e4c1f9"),
    TracePhase.RECEIVE: ShownPhase("waiting for KV", "magenta", "#c39bd3"),
    TracePhase.FLUSH: ShownPhase("text, to the connection", "cyan", "#17a2b8"),
}
