"""`tandem trace`: where one request's time went.

account   computes what the time adds up to: up to the first token, the handover, a decoding step
text      shows a trace in the terminal
picture   draws it as PNG or SVG
why, why_text   `tandem why`: attributes every millisecond to what the request waited for; shows that
command   fetches the trace from the router that has it, and shows it; commands: the rows in the table, with their options
wings     what the simulator adds to `tandem why`
"""
