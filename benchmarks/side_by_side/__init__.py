"""Compares several servers on one machine, one after another, under the same loads (`benchmarks.disaggregation`).

loads        the requests that each server gets
experiment   runs every system under every load, in turns; where the time of a few handovers went
outcome      medians, spread, their floors, and one table
"""
