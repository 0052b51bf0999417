"""Compares several servers on one machine, one after another, under the same loads (`benchmarks.disaggregation`).

loads        the requests that each server gets
experiment   runs every system under every load, in turns
handovers    where the time of a few handovers went
resume       continues a run that was interrupted
outcome      medians, spread, and their floors
show         one table, one picture
"""
