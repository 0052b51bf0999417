"""Where a request's time went, from its first byte here to its last token there.

context   W3C trace context: whose child a request is, and whether it is to be traced
record    a trace as it is shown and exported
clocks    how far each node's clock is from ours
trace     one request's trace, while it grows
traces    the last ones, and who is told when one is complete
otlp      traces for OpenTelemetry's collector
"""
