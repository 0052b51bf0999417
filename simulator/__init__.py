"""Simulates a cluster on a virtual clock: how it would serve a given traffic, and how large it must be.

The product's own scheduler, block pool, router (from admission to a request's end) and autoscaler run here. Only the times are
simulated: the costs of steps, transfers and requests come from a file that was measured on a real node. docs/simulator.md is for users.

    clock            an event loop on virtual time
    costs            the time of a step, interpolated from measurements; many steps with the same requests are added up at once
    traffic          requests from a trace, or drawn at random
    node             a node whose engine computes nothing
    machine          nodes that share one, and slow each other
    network          the transfers of KV between nodes
    pools            the nodes by role, and how the autoscaler resizes them
    outcome          when each answer's tokens came, and the report made of these times
    setup            what one run plays, and on which cluster
    simulation       one run
    profile          measures the costs on a serving cluster
    learnt           the costs that a cluster's nodes have learnt while they served
    beside           what its nodes take longer while they serve together
    profile_client   asks that cluster, and reads steps from its traces
    planner          searches for the cheapest cluster that keeps the limits
    picture          draws goodput against cost
    what_if          one request in other clusters, for `tandem why`
    change           what other sizes of the pools would do to the last requests
    before_change    the same for `tandem scale` and `role`, of all routers and in a few seconds
    commands         what `tandem` finds here: its commands, and what it adds to `tandem why`
    options          the options that several commands share
    show             prints progress and reports
    command          `tandem simulate`
    profile_command  `tandem profile`
    plan_command     `tandem plan`
    change_command   `tandem what-if`
"""
