"""The composition root: turns one configuration into a running deployment, and keeps it running.

    cli           the `tandem` command; wings: commands and flags that may be missing
    config        every setting; settings/ makes one of defaults, file, environment and flags, or reports all mistakes at once;
                  describe: sizes and counts in words; labels: of machines; roles: what each node package says of its own
    control, launcher, events   the contracts between the packages below; tasks, saving: helpers that several of them
                  need; api_client: how a command calls a router; orders: what may be ordered of a running cluster, one
                  table for commands, the HTTP API and the controller
    pools/        keeps every pool as configured: controller, placement, supervision. Knows no Ray
    on_ray/       implements the contracts on Ray: machines, processes, kept state, and the controller as an actor
    static_hosts/ makes pools of machines that exist already, for `ray up`
    models/       turns a model's name into a folder that a node can open
    offline/      models in a Python program: `from tandem import LLM`
    commands/     the commands that operators type, and their output
    adapters/, trace/, replay/, bench/, batches/, chaos/, verify/, foreign_flags/   wings: adapters that change while it serves; where one
                  request's time went; what a node's scheduler decided, step by step; any server measured; files of requests answered;
                  processes killed by a plan, and the effect; two servers' answers compared bit by bit; flags of vLLM and SGLang
    chat/, doctor/   wings: a conversation in the terminal; what is wrong with a machine
    picker/          a wing: tells a Kubernetes gateway which router to ask

Only on_ray/ and static_hosts/ import `ray` here. Floor 6: may import every package below; only the simulator imports
it, whose commands are found by a row in wings.
"""
