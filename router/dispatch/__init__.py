"""A request's whole life: a place in the queue, both nodes told, tokens merged, deadlines, failover, the one end.

admission    how many at once, who waits, whose turn is next
ledger       tokens by index from two nodes, merged into one sequence, with their log-probabilities; when each thing happened to it, and the metrics of it
life         from the first submission to the one end, across attempts
placement    what is asked for, once checked, and one try of it on one pair of nodes: which, what they are told, and who runs where
dispatcher   starts lives, and finds the life that a message belongs to
recall       background answers that other routers began, found on the nodes that keep them
generation   the lives of one HTTP request, as its handler reads them
"""

from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.generation import Generation, ReadableLife, ReadableLives
from tandem.router.dispatch.life import LeftBehind, RequestLife
from tandem.router.dispatch.placement import KeptAnswer, SequenceSpec
from tandem.router.dispatch.recall import FollowedAnswer, FoundAnswer

__all__ = [
    "Dispatcher",
    "FollowedAnswer",
    "FoundAnswer",
    "Generation",
    "KeptAnswer",
    "LeftBehind",
    "ReadableLife",
    "ReadableLives",
    "RequestLife",
    "SequenceSpec",
]
