"""A request's whole life: its place in the queue, its submission to both nodes, its tokens, its deadlines,
its failover, and its one end.

admission    how many sequences run at once, which requests wait, and which one is next
slots        the places of one HTTP request, and its tenant's account
line         the requests that wait, each tenant's in an order of their own
tenants      the tenants that use the pools now
reading      how several tenants share the reading of prompts
giving_way   which sequences pause so that another tenant comes to its part
idle_places  the places of what runs when nothing else does
expected_wait  how long a request would wait, and which are refused for it
ledger       a request's tokens, merged by index from two nodes, with log-probabilities; its timings and metrics
life         one request from its first submission to its one end, across attempts
node_choice  to which nodes a request may go next
placement    one attempt on one pair of nodes
reports      what nodes report of a request's prompt
lives        which request runs where; which nodes pin an agent's last turn; answers that nodes keep and other routers began
generation   the lives of one HTTP request, as its handler reads them
dispatcher   starts the lives of HTTP requests, and finds the life that a node's message belongs to
"""

from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.generation import Generation
from tandem.router.dispatch.life import LeftBehind, RequestLife

__all__ = ["Dispatcher", "Generation", "LeftBehind", "RequestLife"]
