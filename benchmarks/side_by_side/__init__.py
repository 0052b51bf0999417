"""Compares several servers on one machine, one after another, under the same loads.

processes    all processes that one command started, even detached ones, and how they are ended for certain
systems      how each server is started, and when it is ready
loads        the requests that each server gets
experiment   runs every system under every load, in turns
bystanders   whether other processes used the machine
handovers    where the time of a few handovers went
resume       continues a run that was interrupted
outcome      medians, spread, and their floors
show         one table, one picture
"""
