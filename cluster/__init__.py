"""The composition root: from one configuration to a running deployment, and everything that keeps it running.

    cli           the `tandem` command; subcommands: what each does with its options, by commands/ and trace/; vllm_flags: the
                  flags that people bring from vLLM and SGLang; completion: in bash, zsh and fish;
                  documents: what the pages say of settings and flags
    config        everything that can be set; setting_names, setting_layers: found by name, read from each source;
                  settings, rules, describe: put together, checked, its mistakes named at once; labels: of machines;
                  changes: what of it a cluster that runs can take on
    control, launcher, events   the contracts between what follows; tasks, saving: what
                  several of them need; api_client: a router, asked by a command; admin: what an
                  operator may ask of a running cluster, one table for every door
    pools/        keeps every pool what it should be: controller, placement, supervision, scaling. Knows no Ray
    on_ray/       those contracts on Ray: machines, processes, memory, and the controller as an actor
    static_hosts/ machines that one has, as pools for `ray up`
    models/       from a model's name to a folder that a node can open
    commands/     what an operator types, and what is shown
    trace/, replay/   where one request's time went; what a node's scheduler decided, step by step
    chaos/        `tandem chaos`: processes killed and stopped by a plan, and what came of it

`ray` is imported in on_ray/ and static_hosts/ alone. Floor 5: imports everything below, is imported by nothing.
"""
