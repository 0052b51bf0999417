"""`tandem chaos`: kills and stops processes of a cluster by a seeded plan, under the cluster's own traffic or generated requests.

plan       what happens to which kind of process, and when; what that means for the cluster's users
probes     generated requests whose answers are known, and their results
conductor  carries out the plan; it waits until the cluster is whole again before the next blow
report     everything that was observed, as a table and as JSON; what of it is a fault
command    the options; the dry run; commands: its row in the table
"""
