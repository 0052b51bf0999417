"""Machines that exist already, as pools for `ray up` and Ray's autoscaler. README.md lists the files."""
