"""The process around one engine, the same for every role: it takes requests from routers, steps the engine, and sends tokens back.

service      handles a node's requests, from Submit to the last token
requests     checks a Submit against the loaded model, converts it for the engine, and keeps the live requests with their deadlines
answers      keeps the tokens of background answers for any router that asks
loop         the thread that steps the engine, and the mailbox that feeds it
encoders     asks encoder nodes for the rows of this node's images
cache_news   tells routers what the prefix cache holds
status       a node's state, counters and status reports, and the routers that receive them
config       NodeConfig: every setting of one node
ranks/       the other processes of a node with several ranks
trace_file   writes the scheduler trace's lines to files of bounded size
node         builds a node from all of these
hosting      the node's methods for the process that holds it
"""
