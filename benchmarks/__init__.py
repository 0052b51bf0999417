"""Every figure that is claimed anywhere, each made by one command, `python -m benchmarks.NAME`, from the repository's root.

    suite            the short form of those below, one after another, beside their floors: `make bench`
    disaggregation   Tandem both ways on one machine, beside vLLM both ways (side_by_side/)
    burst            three times the capacity for two minutes, beside vLLM (bursting)
    soak             half an hour of everything that clients do (soaking/): `make soak`
    scheduler, scheduler_parity    its speed; whether it decides as the one that it follows
    reserve          what `scheduler.reserve` costs and saves under memory pressure
    agents           agents' jobs with tool calls, with and without pins (`scheduler.policy: continuum`)
    engine           the engine alone (engine_work, engine_tandem, engine_vllm, engine_costs)
    images           first tokens of texts while images are encoded, with an encoder node and without
    hybrid           what recurrent layers cost, beside a dense model and beside transformers
    parallel         what several ranks cost a step, beside one rank
    native_kernels   where a step's time goes in the native library
    gpu              the engine on a GPU (gpu_models, gpu_parity)
    tiers            what tiers of the cache cost and save, and (`tier_floors`) whether that holds their floors
    tier_parity      whether they give up what vLLM's would, and as quickly
    failover         a long conversation whose decode node is killed, with a mirror of its KV and without; or a rank of its node
    transfer         KV through a connector, beside the transport alone (transfer_nodes, transfer_ranks)
    checksums        what checksums cost a handover, also over a link of some rate (transfer_link)
    slow_link        how long requests wait for their KV when a link becomes slow
    router, router_crowds, router_worst, router_peers
                     the router alone, beside clients that behave badly, beside others'
                     (router_engines, router_load, router_relay)
    recompute        many long prompts at once, at a running cluster: what is computed twice
    policies         routing policies in a simulator
    simulation       the simulator beside real runs, with a thousand nodes, and with the autoscaler
    routing          what a decision costs by the number of nodes, and what knowing their caches costs
    tokenizing       a long chat's text to tokens, the first time and its next turn
    one_request      which of our files one chat request runs through
    load_generator   whether `tandem bench` measures right (paced_server)

`machine` is what the machine can do at best, `ending` how a command ends.
"""
