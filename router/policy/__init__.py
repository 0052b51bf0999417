"""Where a request goes: chosen from pool, prefixes and a policy. The policies are pure functions from a snapshot of the pools to a
decision that explains itself.

views         what a policy sees and answers; measured rates of nodes, expected lengths of answers and, from these, expected waits; when the
              decode node should compute the prompt itself
choose        `Chooser`; the policies by name; the nodes that share cached KV with a request's nodes; for traces, the nodes that were not chosen
pairs         which machines are far from each other, as handovers between them show, and nearer pairs of nodes
shortlist     the few nodes of a large pool that a policy ranks; how many blocks the decode nodes have free
"""
