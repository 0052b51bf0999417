"""What every client sees: HTTP in front, the pools behind, and a request's whole life in between.

Floor 2: imports wire and nothing else of ours. It knows neither engine nor transfer.

    config      what a router can be told
    keys        who a request belongs to, and what they may still ask for
    http/       the application: routes, limits, keys, error bodies, server-sent events
    openai/     the API's own types, their checks, and the answers
    responses/  OpenAI's Responses API, and the answers that it keeps
    anthropic/  another API for the same chats
    realtime/   OpenAI's realtime events: a conversation whose prompt may arrive in parts
    images/     images in messages: checked, and their place in a prompt
    formats/    how models write calls and reasoning, told apart from an answer's text
    text/       tokenizer, chat template, incremental detokenization, stop strings
    pool        who is in the cluster and how each node says it is doing
    member      what is known of one node
    rates       what was measured of the nodes
    prefixes    what was sent where, and what nodes say that they have cached
    policy/     pure functions from a snapshot of the pools to a decision that explains itself
    choosing    where a request goes: pool, prefixes and policy as one
    dispatch/   a request's life: queue, submission to both nodes, deadlines, failover, cancellation
    links       the sockets to the nodes, bridged into asyncio
    server      everything above, started, drained and stopped as one
    hosting     the same, as the process that holds it sees it
    tracing/    where a request's time went
    metrics     the router's own; the last ten minutes: how often it was fast enough, and the slowest requests with their causes
    node_metrics   what the nodes report
    siblings    the other router processes on the port; what each tells
                the others of its requests; figures: what all of them count
    page_state  what the page and `tandem top` show of all this
    engine_metrics   the nodes' figures under the names that vLLM's dashboards ask for
    supervision background tasks that cannot die unnoticed
"""
