"""Turns of agents that keep their blocks for their job's next turn (`scheduler.policy: continuum`). README.md lists the
files."""
