"""One KV transfer as both nodes see it, whatever moves the bytes.

State machines without threads, sockets or clocks of their own: messages and commands go in, messages and
outcomes come out, a `Transport` moves bytes. `loop` gives them their one thread, two halves make a connector of
them; a test drives them with a clock and a network that it made up.

    settings    durations and limits
    identity    who we are; what a request's tokens are known by
    geometry    what our KV cache looks like, and whether a peer's fits it
    mapping     which bytes of one cache are which bytes of another
    options     what an operator may say of every connector under this protocol
    statistics  counters
    transport   what must be able to move blocks
    commands    what the scheduler half plans and the worker half carries out
    sending     one transfer, producer's side: which blocks are due, in flight, sent
    handshakes  the consumers that a producer knows
    ledger      which transfers a producer knows, and how others ended
    registrations   what consumers ask of a producer before anything moves
    outgoing    the life of a producer's transfers, from the plan to the end
    progress    what the producer's forward passes have computed
    writing     push: one transfer's writes, posted and looked after
    pushing     push: all transfers that move, and connections that break
    producer    what a producer is told, by its engine and by consumers
    receiving   one transfer, consumer's side
    links       what a consumer knows of a producer: handshake, stamps, silence
    registering a consumer's registrations and leases
    incoming    the life of a consumer's transfers, until they are handed over or safely failed
    reading     pull: one transfer's reads, posted and looked after
    pulling     pull: all transfers that are read, and connections that break
    consumer    what a consumer is told, by its engine and by producers
    stamps      what a producer's leases are counted from
    answers     what is said to a message that cannot be acted on
    declined    transfers that a consumer will not take
    endpoint    producer and consumer of one node behind one address
    loop        the thread that runs an endpoint
    channel     the sockets between endpoints
    scheduler_half, worker_half   the two halves of a connector
"""
