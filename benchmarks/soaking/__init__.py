"""A long, mixed load on one cluster, and what it leaves behind.

questions    the requests: prompts whose answers are known, and prompts that are new each time
asking       sends one request as one of several kinds of clients do; some of these disconnect before the end
load         sends many at once, for as long as the soak lasts
watching     observes memory, descriptors and threads of every process, and whether they grow
killing      kills a node every now and then, and measures how long it takes to come back
verdict      everything that was measured, as a table, and what of it is a fault
"""
