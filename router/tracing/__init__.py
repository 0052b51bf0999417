"""Where a request's time went, from its first byte here to its last token there.

record    a trace as it is shown and exported; W3C trace context: the span that a request belongs to
clocks    how far each node's clock is from ours
trace     one request's trace, while it grows
traces    the last ones, and who is told when one is complete
otlp      traces for OpenTelemetry's collector
"""
