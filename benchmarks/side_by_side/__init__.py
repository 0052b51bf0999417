"""Compares several servers on one machine, one after another, under the same loads (`benchmarks.disaggregation`).

loads        the requests that each server gets
outcome      medians, spread, their floors, and one table
"""
