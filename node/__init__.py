"""What is the same for nodes of every role: the process around an engine that takes requests from routers, steps it, and sends tokens
back; and the life of a node, with an engine or without.

lifecycle    what each node does for its routers: pings, statuses, drains, failure
service      handles a node's requests, from Submit to the last token
requests     checks a Submit against the loaded model, converts it for the engine, and keeps the live requests with their deadlines
answers      keeps the tokens of background answers for any router that asks
loop         the thread that steps the engine, and the mailbox that feeds it
routers      the routers that were heard lately, which are told statuses and what the prefix cache holds
status       makes a status and its counters
roles        what a cluster does differently for the nodes of one role
config       NodeConfig: every setting of one node
wings        what a node may do besides: each is a folder here that can be deleted
grammar/     answers that follow a grammar
encoders/    asks encoder nodes for the rows of this node's images
kv_events/   KV events for programs outside Tandem
step_costs/  what this node's steps take, learnt from them
step_trace/  the scheduler trace
gpu_health/  names the node's GPUs that must not compute any more
canary/      in idle time, recomputes prompts that peers have sent
ranks/       the other processes of a node with several ranks
near         which RDMA devices are nearest to a node's GPU
node         a node of any role, from start to stop
engine_node  builds a node with an engine from all of these
hosting      the node's methods for the process that holds it
"""
