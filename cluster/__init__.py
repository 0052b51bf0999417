"""The composition root: from one configuration to a running deployment, and everything that keeps it running.

    config, settings, rules     what the operator asked for, and every mistake in it at once
    preflight, doctor           can this machine do it
    model_store, model_fetch    from a model's name to a folder that every node can open
    placement                   which node gets which cores, device and share of memory
    controller                  keeps a deployment what its configuration says; knows no Ray
      supervisor, node_supervisor, router_supervisor, membership, clock, events
    launcher, ray_launcher      where nodes and routers run: the interface, and Ray behind it
    ray_runtime                 Ray on this machine: ours, quiet, and gone with us
    deployment, serve           all of it together, from the command to the last process ended
    cli, chat, status, progress the `tandem` command
    provider                    pools on machines that one has, for `ray up`

Floor 5: imports everything below, is imported by nothing.
"""
