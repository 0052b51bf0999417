"""One KV transfer as both nodes see it, whatever moves the bytes.

State machines without threads, sockets or clocks of their own: messages and commands go in, messages and
outcomes come out, a `Transport` moves bytes. `loop` gives them their one thread, two halves make a connector of
them; a test drives them with a clock and a network that it made up.

What both sides know:

    settings    durations and limits
    options     what an operator may say of every connector under this protocol
    processes   which process of which machine a node is, and whether one has ended
    identity    who we are; what a request's tokens are known by
    geometry    what our KV cache looks like, and whether a peer's fits it
    mapping     which bytes of one cache are which bytes of another
    transport   what must be able to move blocks
    commands    what the scheduler half plans and the worker half carries out
    answers     what is said to a message that cannot be acted on
    checksums   what blocks are compared by, and which of them
    statistics  how transfers ended, and what they moved
    side        all that both sides of one node have in common

The producer, which has computed a prompt:

    producer    what it is told, by its engine and by consumers
    registrations   what consumers ask of it before anything moves
    handshakes  the consumers that it knows
    ledger      which transfers it knows, and how others ended
    outgoing    the life of its transfers, from the plan to the end; here its blocks become free
    sending     one transfer: which blocks are due, in flight, sent
    progress    what its forward passes have computed
    pushing     push: all transfers that move, and connections that break
    writing     push: one transfer's writes, posted and looked after
    stamps      what its leases are counted from

The consumer, which decodes:

    consumer    what it is told, by its engine and by producers; here a handoff is accepted or refused
    registering its registrations and leases
    links       what it knows of a producer: handshake, stamps, silence
    incoming    the life of its transfers, until they are handed over or have failed
    quarantine  when nothing can write any more to the blocks of one that failed
    receiving   one transfer
    verifying   what came is compared with its checksums before anything uses it
    declined    transfers that it will not take
    pulling     pull: all transfers that are read, and connections that break
    reading     pull: one transfer's reads, posted and looked after

Around both:

    endpoint    producer and consumer of one node behind one address
    loop        the thread that runs an endpoint
    channel     the sockets between endpoints
    scheduler_half, worker_half   the two halves of a connector
"""
