"""The router: HTTP for clients in front, the pools of nodes behind, and each request's whole life in between.

Floor 3: it imports api, http_server, wire and base. It knows neither engine nor transfer.

    config      the router's configuration
    keys        which tenant a request belongs to, and what is left of its quotas
    http/       the HTTP application: routes, limits, keys, error bodies, server-sent events
    pool        the members of the cluster; member: one of them and its last report; in_view: those that may get requests
    prefixes    which nodes have a prompt's first blocks cached, by their reports and by what was sent
    policy/     chooses a request's nodes, from pool, prefixes and a policy that explains itself
    dispatch/   a request's life: queue, submission to both nodes, deadlines, failover, cancellation
    links       the sockets to the nodes, on the event loop
    server      the whole router: started, drained and stopped
    hosting     the router as its process sees it
    wings       what a deployment may never use: batches/, messages/, other_models/, processes/, quotes/, realtime/, receipts/,
                responses/, tracing/, vectors/
    tracer      where a request's time went, as the rest of the router notes it
    promises    what an answer may carry that a client asks for: by when its first token comes, and a receipt
    metrics     the router's own metrics
    recent      the last ten minutes: how many requests met the `slo`, why the slowest did not, and what went wrong
    node_metrics   the nodes' reports as metrics
    siblings    the other router processes on the port, as the rest of the router knows them
    page_state  the data of the page and of `tandem top`
    engine_metrics   the nodes' figures under the names that vLLM's dashboards use
"""
