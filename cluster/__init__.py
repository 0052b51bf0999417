"""The composition root: from one configuration to a running deployment, and everything that keeps it running.

    config, settings, rules     what the operator asked for, and every mistake in it at once
    preflight, doctor           can this machine do it
    model_store, model_fetch    from a model's name to a folder that every node can open
    placement                   which node gets which cores, device and share of memory
    controller                  starts, watches, replaces and drains nodes and the router; knows no Ray
    launcher, ray_launcher      where nodes and routers run: the interface, and Ray behind it
    serve                       all of it together, from the command to the last process ended
    cli, chat, status           the `tandem` command

Floor 5: imports everything below, is imported by nothing.
"""
