"""Ray behind the contracts of this package: where machines, processes and memory come from.

runtime             a Ray of our own, or one that runs already; the only place that starts or joins one
neighbours          the other deployments on the same Ray cluster: where their nodes are, and what they ask for
hosts, launcher, state_store, errors    `cluster.launcher` and `cluster.launcher` as Ray has them
deploying           a deployment put together out of these
controller_actor, node_actor, router_actor   shells without logic; ending: what the last two do when their process gets SIGTERM
spread              what a node has on several machines: its places, and the shell of the process that keeps its ranks on another one
exchange            one controller in the place of another, of another version of Tandem
remote_controller   the controller from another process; operating: the door to it that a router holds open
processes           which process is which, and signals to them, for `tandem chaos`
"""
