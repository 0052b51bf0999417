"""Keeps a deployment's pools what they should be, on the machines that there are. Knows no Ray.

deployment, controller_host       a controller and the address that answers; as the process that holds it sees it
controller, limits                what may be asked for, and what may not
reconciler, plan                  the one task that changes things; what it changes next
rollout, rollout_watch            which node is replaced next, when the configuration is another one; what is seen of the new ones
departures                        nodes and routers that go
state, view                       what the next controller must know, what routers are told; what commands are told
placement                         which machine, cores, device and share of memory a node gets; this machine as the only one
room                              how many nodes a machine offers room for; whether they are too many
fleet                             the supervisors that there are; the nodes that routers are told of
supervisor, node_supervisor, router_supervisor   one process: started, watched, replaced, left out
unseen_node                       one that an earlier controller placed on a machine that this one does not see
witnesses                         what routers, clients and nodes see of one that is silent
autoscaling, load_meter, autoscaler              how large a pool should be; what is measured; the loop around both
adapter_desk                      which LoRA adapters nodes have; changed on every node or on none
event_log                         what happened, numbered
"""
