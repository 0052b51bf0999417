"""Keeps each pool of a deployment as it was ordered, on the machines that exist. Knows no Ray.

deployment, controller_host       a controller with its routers' URL; the controller as its process serves it to commands
controller                        what a deployment's owner and its operators call
operator_changes                  what an order changes in the recorded state, and what is refused
changes, over_http                which settings a running cluster can change; what only the command may, and HTTP may not
reconciler                        the recorded state, and the one task that makes processes as it says
facts, plan                       what is known of machines and processes; from it and the state, the next change
departures                        nodes and routers that are draining before they end
revision_configs                  the configurations that a recorded state names
turn                              of two controllers only the later one records and acts
state, view                       what the next controller must know and what routers are told; what commands are shown
placement                         which machine, cores, device and share of memory a node gets; this machine as the only one
room                              how many nodes a machine has room for
fleet                             all supervisors; the nodes that routers are told of
supervisor, node_supervisor, router_supervisor   start, watch and replace one process, or leave it out
unseen_node                       a node on a machine that this controller has not seen yet
witnesses                         what routers, clients and nodes hear of a process that does not answer the controller
wings: autoscaling/, rollouts/, gpu_health/, foresight/     what a controller can do beside that: pools that grow and shrink by their
    load; nodes whose card is sick are replaced; new configurations; what changes of sizes were expected to bring is graded
event_log                         what happened, numbered
"""
