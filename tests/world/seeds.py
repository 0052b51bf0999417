"""Seeds that broke a promise once. A seed draws another schedule when the world draws something more or less, so each bug has a test
of its own, too; these are run because where a bug was, another one may be.
"""

FOUND = {
    69: "a new request waited 5 s while a node was away: routers look for another node after a silence, not at once",
    1181595329: "a decode node kept its blocks for a prefill node stopped on its machine, and nothing was promised of it",
    2000252: "a preempted request stayed on such a node, though another had room",
}
