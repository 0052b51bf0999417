"""The cluster on a clock that jumps: how it would serve a traffic, and how large it should be, without a machine.

Real are the engine's scheduler and block pool, the router from its admission to a request's end, and the autoscaler. What a step,
a transfer and a request take comes from a file of costs, which was measured on a real node. docs/simulator.md is for its users.

    clock       an event loop whose time jumps
    costs       what a step takes, interpolated; many alike steps added up
    traffic     requests from a trace, or by chance
    node        a node whose engine computes nothing
    network     KV on its way
    pools       the nodes by role, as the autoscaler sizes them
    outcome     when tokens came, and what that adds up to
    simulation  one run of it all
    profile     the costs, measured on a cluster that serves; profile_command: `tandem profile`
    planner     the least of what is enough, by simulations; picture: goodput against cost; plan_command: `tandem plan`
    what_if     one request in other clusters, for `tandem why`
    command     `tandem simulate`; options: what it and its like are told; show: what they print
"""
