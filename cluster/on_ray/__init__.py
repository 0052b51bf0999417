"""Implements the contracts of `cluster/` on Ray: machines, processes and kept state.

runtime             starts a Ray of our own or joins one that runs; no other file does either; auth_token: keeps Ray's token private,
                    and asks whether a Ray accepts it; private_folder: where other users cannot enter; lean: the
                    processes that a Ray of our own goes without, and lean_agent: the script in place of one of them
neighbours          the other deployments on the same Ray cluster: where their nodes are, and what they ask for
launcher, hosts, state_store    implement `cluster.launcher` on Ray; errors translates Ray's exceptions
handles             the actors that the launcher starts: found or made, watched, ended
deploying           builds a deployment from these parts
controller_actor, router_actor   actors without logic of their own; ending: how they and nodes handle SIGTERM
spread              a node whose ranks are on several machines: its placement group, and the actor that keeps the ranks on each other machine
exchange            replaces one controller by another, possibly of another version of Tandem
remote_controller   the controller as other processes call it
processes           finds a deployment's processes and signals them, for `tandem chaos`
"""
