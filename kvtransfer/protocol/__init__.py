"""One KV transfer as both nodes see it, whatever moves the bytes.

State machines without threads, sockets or clocks of their own: messages and commands go in, messages and
outcomes come out, a `Transport` moves bytes. `loop` gives them their one thread, `halves` make a connector of
them; a test drives them with a clock and a network that it made up.

    settings    durations and limits
    identity    who we are; what a request's tokens are known by
    transport   what must be able to move blocks
    commands    what the scheduler half plans and the worker half carries out
    sending     one transfer, producer's side: which blocks are due, in flight, sent
    producer    all of them: registrations, leases, notices
    receiving   one transfer, consumer's side
    links       what a consumer knows of a producer: handshake, stamps, silence
    consumer    all of them: registration, verification, cancellation
    endpoint    producer and consumer of one node behind one address
    loop        the thread that runs an endpoint
    channel     the sockets between endpoints
    halves      scheduler half and worker half
"""
