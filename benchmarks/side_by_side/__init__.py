"""Several servers on one machine, one after another, under the same loads.

processes    everything that one command started, however it detached itself, and its certain end
systems      how each server is started, and when it is ready
loads        what they are asked
experiment   every system under every load, in turns
bystanders   who else used the machine meanwhile
handovers    where the time of a few handovers went
resume       going on where a run was interrupted
outcome      medians, spread, and the floors that they are held to
show         one table, one picture
"""
