"""What every room may use, and what no process says to another: errors, settings, logs, progress, shares, tasks
and wings.

Floor 0: imports nothing of ours.

    errors      the tree of everything that can go wrong, with the code a client sees
    settings    which values a setting takes, and the sentence that says so
    logs        a process's log, for people or for machines
    tasks       background tasks, whose end is always noticed
    progress    the latest step of a long task, and how long ago it came
    flags       flags of commands, a line each
    wings       parts that can be deleted, each known by the name of its module
    own_thread  calls that nothing waits for when the process ends, and that may go deep; what a process does when its parent ends
    percentile  of measured values
    shares      what several owners use, and how much of it one of them may hold
"""
