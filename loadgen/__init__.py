"""The load generator: measures any OpenAI-compatible server as its users experience it.

    timeline     one request as it happened: when each chunk came, or why none did
    metrics      what a run's timelines add up to: percentiles, throughput, goodput under a service level
    http1, connections, answers, api
                 from a socket's bytes to a timeline, at so little cost that the measurement is not disturbed
    vocabulary, workload, traces
                 prompts of an exact number of tokens, synthetic or replayed from a recorded trace
    load         makes a run's sessions and their arrival times; sends them at those times, or by a number of concurrent users
    show, report progress, table and plot in the terminal; the run as JSON
    options
                 the flags of one run

Definitions are those of vLLM's load generator, so that figures can be compared: time to first token (TTFT) runs from
sending the request to its first chunk; time per output token (TPOT) is the rest of the answer's time divided by its
other tokens; inter-token latency (ITL) is the time between two chunks; a request's end-to-end time ends with its last
chunk. Percentiles interpolate linearly, and are taken over the requests that succeeded. Throughput is over the run's
whole duration, from the first send to the last answer.
"""
