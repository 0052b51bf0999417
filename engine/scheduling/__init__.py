"""Who computes how many tokens in the next step, and what came of it.

scheduler       the whole of it; everything else is its parts
state           what the parts share
queue, waiting  the line, those that were passed over, those that wait for an event
policies        who goes first, who gives way
running         first half of a step: those that run
admission       second half: those in line
pace            how much of prompts a step takes on while others decode
step            what has been decided of a step so far
output          what the runner is told and what it answers
results         the model's answer, booked
transfers       the connector's news, booked; invalid_blocks is its hardest case
open_step       planning a step while the one before it runs
lifecycle       how a request begins, loses its turn and ends
stopping        when a token is the last
stats           numbers
audit           what must always hold
"""
