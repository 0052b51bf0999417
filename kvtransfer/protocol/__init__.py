"""One KV transfer as both nodes see it, whatever moves the bytes.

State machines without threads, sockets or clocks of their own: messages and commands go in, messages and
outcomes come out, a `Transport` moves bytes. `loop` gives them their one thread, two halves make a connector of
them; a test drives them with a clock and a network that it made up.

    settings    durations and limits
    identity    who we are; what a request's tokens are known by
    geometry    what our KV cache looks like, and whether a peer's fits it
    statistics  counters
    transport   what must be able to move blocks
    commands    what the scheduler half plans and the worker half carries out
    sending     one transfer, producer's side: which blocks are due, in flight, sent
    writing     push: posting writes, looking after them
    handshakes  the consumers that a producer knows
    ledger      which transfers a producer knows, and how others ended
    registrations   what consumers ask of a producer before anything moves
    producer    pairs registrations with requests, from plan to notice to the end
    receiving   one transfer, consumer's side
    reading     pull: posting reads, looking after them
    links       what a consumer knows of a producer: handshake, stamps, silence
    registering a consumer's registrations and leases
    stamps      what a producer's leases are counted from
    answers     what is said to a message that cannot be acted on
    declined    transfers that a consumer will not take
    consumer    from a destination to a verified handoff, or to a failure that is safe
    endpoint    producer and consumer of one node behind one address
    loop        the thread that runs an endpoint
    channel     the sockets between endpoints
    scheduler_half, worker_half   the two halves of a connector
"""
