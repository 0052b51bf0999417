"""The load generator: what a user of any OpenAI-compatible server would have felt.

    timeline     one request as it happened: when each chunk came, or why none did
    metrics, percentiles, slo
                 what a run's timelines add up to
    http1, sse, connections, answers, shape, api
                 from a socket's bytes to a timeline, at a cost that does not disturb what is measured
    vocabulary, workload, synthetic, traces
                 what is asked: prompts of exactly so many tokens
    arrivals, load
                 when it is asked, and by how many at once
    table, plot, report, progress
                 what the operator sees
    options, plan
                 one run, as it was asked for

Definitions are those of vLLM's load generator, so that figures can be laid side by side: time to first token (TTFT)
runs from the request's sending to its first chunk; time per output token (TPOT) is the rest of the answer's time
divided by its other tokens; inter-token latency (ITL) is the time between one chunk and the next; a request's
end-to-end time ends with its last chunk. Percentiles interpolate linearly, and are taken over the requests that
succeeded. Throughput is over the run's whole duration, first send to last answer.
"""
