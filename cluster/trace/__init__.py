"""`tandem trace`: where one request's time went.

account   what it adds up to: the way to the first token, the handover, a step
text      in the terminal
picture   as PNG or SVG
why, why_text   `tandem why`: every millisecond of it, given to what it waited for
command   fetches the trace from the router that has it, and shows it
"""
