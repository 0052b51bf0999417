"""One KV transfer as both nodes see it, whatever moves the bytes.

State machines without threads, sockets or clocks of their own: messages and commands go in, messages and
outcomes come out, a `Transport` moves bytes. `ProtocolLoop` gives them their one thread, two halves make a connector of
them; a test drives them with a clock and a network that it made up.

What both sides know:

    processes   which process of which machine a node is, and whether one has ended
    cache_map   what our KV cache looks like, whether a peer's fits it, which bytes of one are which bytes of the other
    shards      the same where the ranks of a node keep their heads apart: which of its ranks moves which bytes
    checksums   what blocks are compared by, and which of them
    transport   what must be able to move blocks
    commands    what the scheduler half plans and the worker half carries out
    statistics  what is measured: how fast a link moves and a node computes, whether a transfer is worth its wait; how transfers
                ended, and what they moved
    side        what both sides of one node have in common: who it is to its peers, durations and limits, what an operator may say of
                every connector under this protocol, and what is said to a message that cannot be acted on
    links       the nodes on the other side, as each side knows them: handshake, stamps, silence; how a consumer registers its
                blocks and renews its leases

The producer, which has computed a prompt:

    producer    what it is told, by its engine and by consumers: here a destination is registered or refused
    outgoing    which transfers it knows, and their life from the plan to the end; here its blocks become free
    sending     one transfer: which blocks are due, in flight, arrived for good
    pushing     push: one transfer's writes, all transfers that move, how far forward passes have brought them, connections
                that break

The consumer, which decodes:

    consumer    what it is told, by its engine and by producers; here a handoff is accepted or refused
    incoming    the life of its transfers, until they are handed over or have failed; those that it will not take; when
                nothing can write any more to the blocks of one that failed
    receiving   one transfer
    pulling     pull: one transfer's reads, all transfers that are read, and connections that break

Around both:

    endpoint    producer and consumer of one node at one address, that address, and the thread that runs them
    halves      the two halves of a connector: the one that plans, and the one that moves
"""
