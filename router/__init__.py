"""What every client sees: HTTP in front, the pools behind, and a request's whole life in between.

Floor 2: imports wire and nothing else of ours. It knows neither engine nor transfer.

    config      what a router can be told
    http/       the application: routes, limits, keys, error bodies, server-sent events
    openai/     the API's own types, their checks, and the answers
    text/       tokenizer, chat template, incremental detokenization, stop strings
    pool        who is in the cluster and how each node says it is doing
    policy/     pure functions from a snapshot of the pools to a decision that explains itself
    dispatch/   a request's life: queue, submission to both nodes, deadlines, failover, cancellation
    links       the sockets to the nodes, bridged into asyncio
    server      everything above, started, drained and stopped as one
    actor       the same, as a Ray actor
"""
