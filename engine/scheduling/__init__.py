"""Who computes how many tokens in the next step, and what came of it.

scheduler       the whole of it; everything else is its parts
state           what the parts share: the step's plan, its prompt budget, and planning it while the last one runs; numbers
queue           requests in the order of a policy: which goes first, which gives way; those that were passed over or wait for an event
pins            which turns keep their blocks for their job's next turn; how long tools take
admission       who computes in a step: those that run, then those in line
unchanged       many steps at once that all do the same, for a simulation
drafting        how many tokens are guessed for which request, so that it pays
output          what the runner is told and what it answers
results         the model's answer and the connector's news, booked; invalid_blocks is the hardest case
lifecycle       how a request begins, loses its turn and ends
step_trace      the scheduler trace: what it saw and decided, as records for `tandem replay`
audit           what must always hold
"""
