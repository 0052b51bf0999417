"""Turns of agents that keep their blocks for their job's next turn (`scheduler.policy: continuum`).

pins    which ended turns are pinned, and until when
tools   how long tools take
policy  the order of requests: those of jobs with a pin first
"""
