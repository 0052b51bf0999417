"""`tandem trace`: where one request's time went.

fetch     the trace, from the router that has it
account   what it adds up to: the way to the first token, the handover, a step
text      in the terminal
picture   as PNG or SVG
command   the command
"""
