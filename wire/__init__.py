"""What crosses a process boundary: one typed message per hop, and the sockets that carry them.

Floor 1: imports nothing of ours. Everything is msgspec; nothing here or above ever unpickles bytes.

    versions    the version of these messages, and the rules by which they change
    errors      the tree of everything that can go wrong, with the code a client sees
    settings    which values a setting takes, and the sentence that says so
    sampling    how a request wants its tokens chosen
    adapters    what a LoRA adapter is called by all processes
    images      how many placeholder tokens an image takes, and where they stand
    embeds      prompts of rows that stand in the place of tokens' embeddings
    pooling     how a model's hidden states become one vector
    nodes       who is in the cluster: identity, role, epoch, addresses
    requests    router -> node (Submit, Cancel, Ping) and node -> router (TokenBatch, NodeStatus, Holding); what both call a prompt's
                blocks when they speak of caches
    kv_events   what happens to a node's KV cache, in the shape that other programs read
    lines       numbers on all of these, so that a lost message is noticed and sent again
    tracing     node -> router: where a traced request's time went, and by which clock
    encoding    node -> encoder node: which rows of images are wanted, and the rows
    handoff     node -> node: how a prefill node and a decode node agree on a KV transfer
    sharing     node -> node: how one copies KV out of another's tier in host memory
    progress    what a long work says of itself, and for how long it has said nothing new
    logs        what a process writes to its log, for people or for machines
    listening   whether a process still listens at an address, asked of its machine's kernel
    endpoints   where a process is reached: its address, and the key that it must hold
    curve       who may speak to this process: its key pair, the keys that it admits, and the doorkeeper who compares
    sockets     inboxes (received by a thread, or by an event loop) and the Outbox (sends, from any thread), on libzmq
"""
