"""Where a request's time went, from its first byte in to its last token out.

wing      the paths, all processes' traces, whether they are exported
record    a trace as it is shown and exported; W3C trace context, which names the caller's span
traces    one request's trace while it grows; nodes' clock offsets; the last traces; when a trace is complete
otlp      sends traces to OpenTelemetry's collector
"""
