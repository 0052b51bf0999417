"""Machines that one has, as pools for `ray up` and Ray's autoscaler: `provider` is what Ray calls a node provider."""
