"""What crosses a process boundary: the message types, one for each hop, and the sockets that carry them.

Floor 1: imports `base` alone. Every message is a msgspec struct; nothing here or above unpickles bytes.

    versions      the version of these messages, and the rules by which they change
    sampling      how a request wants its tokens chosen
    adapters      the identity that all processes give a LoRA adapter
    images        how many placeholder tokens an image takes, and where they stand
    embeds        prompts of rows, each in place of a token's embedding
    pooling       how a model's hidden states become one vector
    nodes         the nodes and routers of a cluster: identity, role, epoch, addresses
    requests      router -> node (Submit, Cancel, Ping ...) and node -> router (TokenBatch, NodeStatus, Holding ...)
    block_hashes  the hashes by which both name a prompt's blocks
    step_costs    what a node's steps take, as it has learnt
    forecasts     what a change of sizes is expected to bring, and what came of it
    kv_events     what happens to a node's KV cache, in the shape that other programs read
    lines         numbers these messages, so that a lost one is noticed and sent again
    tracing       node -> router: where a traced request's time went, and the node's clock
    encoding      node -> encoder node: which rows of images a node wants; and back: the rows
    handoff       node -> node: how a prefill node and a decode node agree on a KV transfer
    sharing       node -> node: how one copies KV out of another's tier in host memory
    listening     whether a process still listens at an address, asked of its machine's kernel
    endpoints     a process's address, with the public key that it must hold
    curve         who may speak to this process: its key pair, the keys that it admits, and the authenticator that compares
    sockets       inboxes (received by a thread, or by an event loop) and the Outbox (sends, from any thread), on libzmq
"""
