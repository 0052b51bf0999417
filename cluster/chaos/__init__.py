"""`tandem chaos`: processes of a cluster are killed and stopped by a seeded plan, under its own or generated traffic.

plan       what is done to which kind of process, and when; what that means for a cluster's users
probes     generated requests whose answers are known, and what came of them
conductor  the plan carried out, the next blow only when the cluster is whole again
report     everything that was seen, as a table and as JSON; what of it must not be
command    its arguments; the dry run
"""
