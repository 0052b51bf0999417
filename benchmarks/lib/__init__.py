"""What every benchmark needs.

harness      how its flags are read, how it ends, and where its figures go
tables       tables of rows, and floors: what a figure must reach
processes    child processes; all processes that one command started, and how they are ended for certain
servers      Tandem and vLLM as servers: how each is started, when it is ready, and a load that Tandem's load generator sends it
connections  plain HTTP over sockets, so that no library is measured
engines      an engine with a model and no node around it, and its timed steps
machine      the machine's limits, and whether others are using it
"""
