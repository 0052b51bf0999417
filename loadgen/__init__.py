"""The load generator: what a user of any OpenAI-compatible server would have felt.

    timeline     one request as it happened: when each chunk came, or why none did
    metrics      a run's timelines summed up: percentiles, throughput, goodput under a service level
    http1, connections, answers, api
                 from a socket's bytes to a timeline, cheaply enough not to disturb what is measured
    vocabulary, workload, traces
                 prompts of an exact number of tokens, synthetic or replayed from a recorded trace
    load         a run's sessions and their arrival times; sends them, at given times or by a number of users at once
    show, report progress, table and plot in the terminal; the run as JSON
    options
                 one run's flags

Definitions are those of vLLM's load generator, so that figures can be laid side by side: time to first token (TTFT)
runs from the request's sending to its first chunk; time per output token (TPOT) is the rest of the answer's time
divided by its other tokens; inter-token latency (ITL) is the time between one chunk and the next; a request's
end-to-end time ends with its last chunk. Percentiles interpolate linearly, and are taken over the requests that
succeeded. Throughput is over the run's whole duration, first send to last answer.
"""
