"""Who computes how many tokens in the next step, and what came of it.

scheduler       the whole of it; everything else is its parts
state           what the parts share
queue           requests in the order of a policy: which goes first, which gives way
waiting         the requests in line, those that were passed over, those that wait for an event
pins            which turns keep their blocks for their job's next turn; tool_times learns how long tools take
running         first half of a step: those that run
admission       second half: those in line
step            the plan of one step, its prompt budget, and planning it while the last one runs
unchanged       many steps at once that all do the same, for a simulation
drafting        how many tokens are guessed for which request, so that it pays
output          what the runner is told and what it answers
results         the model's answer, booked; when a token is a request's last
transfers       the connector's news, booked; invalid_blocks is its hardest case
lifecycle       how a request begins, loses its turn and ends
stats           numbers
step_trace      the scheduler trace: what it saw and decided, as records for `tandem replay`
audit           what must always hold
"""
