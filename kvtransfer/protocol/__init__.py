"""One KV transfer as both nodes see it, whatever moves the bytes.

The state machines here have no threads, sockets or clocks of their own. They take messages and commands, and return
messages and outcomes; a `Transport` moves the bytes. `ProtocolLoop` runs them in one thread, and two halves make a
connector of them. A test runs them on a clock and a network of its own.

What both sides use:

    processes   which process on which machine a node is, and whether a process has ended
    cache_map   what our KV cache looks like, whether a peer's fits it, and which bytes of the two correspond
    shards      the same for nodes whose ranks keep their heads apart: which rank moves which bytes
    checksums   how the checksum of a grain is computed, and which grains carry one
    transport   the interface of whatever moves blocks
    commands    what the scheduler half plans and the worker half carries out
    settings    durations and limits, and options that every connector of this protocol has
    side        a node's identity to its peers, its answers to messages that it cannot act on, and what it measures:
                rates of links and of computing, whether a transfer is worth its wait, how transfers ended
    links       what each side knows of the nodes on the other: handshake, stamps, silence; a consumer registers its
                blocks and renews its leases here

The producer, which has computed a prompt:

    producer    takes commands of its engine and messages of consumers; registers or refuses a destination
    outgoing    all its transfers, from the plan to the end; frees their blocks
    sending     one transfer: which grains are due, in flight, or at the consumer for good
    pushing     push: posts the writes of all transfers, follows the forward passes, and handles broken connections

The consumer, which decodes:

    consumer    takes commands of its engine and messages of producers; accepts or refuses a handoff
    incoming    all its transfers, until they are handed over or have failed; those that it declines; when nothing can
                write any more to the blocks of a failed one
    receiving   one transfer
    generations which generation of its cache each producer's KV is of, and which producers must hear that theirs was wrong
    pulling     pull: posts the reads of all transfers, and handles broken connections

Around both:

    endpoint    one node's producer and consumer, their address, and the thread that runs them
    halves      the two halves of a connector
"""
