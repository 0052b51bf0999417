"""Where a request's time went, from its first byte here to its last token there.

record    a trace as it is shown and exported; W3C trace context: the span that a request belongs to
traces    one request's trace while it grows, how far each node's clock is from ours, the last traces, and who is told when one is complete
otlp      traces for OpenTelemetry's collector
"""
