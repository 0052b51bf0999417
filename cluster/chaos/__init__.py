"""`tandem chaos`: kills and stops processes of a cluster by a seeded plan, under the cluster's own traffic or generated
requests. README.md lists the files."""
