"""A process of an engine, the same for both roles: it takes requests from routers, steps, and sends tokens back.

service      a node's requests, from Submit to the last token
requests     what of one is checked against the model that is here, and what the engine is given of it; those that have not ended, and
             their deadlines
answers      made in the background, and kept for any router that asks
loop         the thread that steps the engine, and the mailbox that feeds it
encoders     rows of images that encoder nodes make for this one
cache_news   what routers are told of the prefix cache
status       what a node reports of itself, its state and its counters, and the routers that hear of it
config       what a node can be told
ranks/       the other processes of a node of several ranks
trace_file   the scheduler trace's lines, written to files of bounded size
node         all of it put together; hosting: as the process that holds it sees it
"""
