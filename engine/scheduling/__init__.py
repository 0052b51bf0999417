"""Decides how many tokens each request computes in the next step, and books the step's results.

scheduler       `Scheduler`, the only entry; the other files are its parts
state           what the parts share: requests, the step's plan, the open step, counters
pace            how many prompt tokens fit into a step
queue           waiting requests, in the order of a policy; also those that were passed over or wait for an event
admission       the two phases of a step: running requests first, then waiting ones
beside          short prompts beside a long one that has begun
idle_work       requests that run when nothing else does
unchanged       takes many identical steps at once, for a simulation
wings           what can be deleted: pins/ (agents' turns that keep their blocks), drafting/ (how long drafts may be) and
                encoding/ (which step encodes an image)
parts           what a wing's part of the scheduler can be asked
output          what the scheduler sends to the model runner, and what the runner returns
results         books the model's output and the connector's events
invalid_blocks  rewinds requests that used blocks whose load failed
lifecycle       how a request is added, preempted and ended, and when its blocks are freed
audit           checks the invariants between two steps
"""
