"""A long, mixed load on one cluster, and what it leaves behind.

questions    what is asked: prompts whose answers are known, and prompts that were never asked before
asking       one request, as one of many kinds of client would make it, some of which go away in the middle
load         many of them at once, for as long as it lasts
watching     memory, descriptors and threads of every process, and whether they grow
killing      a node every now and then, and how long it takes to come back
verdict      everything that was measured, as a table, and what of it must not be
"""
