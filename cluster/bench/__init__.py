"""`tandem bench`: one run of the load generator (loadgen/), from its flags to its table."""
