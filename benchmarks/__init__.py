"""Every claimed figure has one command that measures it: `python -m benchmarks.NAME`, run from the repository's root.

    suite            a short run of those below, one after another, with their floors: `make bench`
    disaggregation   Tandem and vLLM on one machine, each disaggregated and aggregated (side_by_side/)
    soak             half an hour of everything that clients do: `make soak`
    scheduler        the scheduler's speed
    engine           the engine alone, beside the machine's limit
    vllm_step        what Tandem adds to a step of vLLM
    native_kernels   where a step's time goes in the native library
    gpu              the engine on a GPU, part by part (gpu_parts, gpu_report): its answers (gpu_parity), its speed (gpu_speed,
                     gpu_profile, gpu_models), two engines on one card (gpu_handover)
    transfer         KV through a connector, compared with the transport alone (transfer_nodes, transfer_ranks)
    router, router_worst
                     the router alone, and the worst that one key or a stranger can do to it (router_attacks). router_bed has the
                     processes of both
    beside_batch     what users feel of a batch on a real cluster
    recompute        many long prompts at once in a running cluster: what is computed twice
    simulation       the simulator compared with real runs
    forecasts        what is foretold of a change of sizes, graded on a real cluster
    quotes           how many of a router's quotes are kept, in simulation
    routing          what a decision costs by the number of nodes, and what tracking their caches costs
    load_generator   whether `tandem bench` measures correctly

All have one form, `lib.harness`: `parser_of` makes the flags, with the module's docstring as the help; `report` writes the figures with the
machine and the command (`--json FILE`), shows tables and floors, and ends with 1 if a floor is missed. `lib` also has processes, servers,
engines, and the machine's limits.
"""
