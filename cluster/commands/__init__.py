"""The commands that operators type, and their output.

serve         with preflight, model_checks and model_files (checks before the start), progress (what is shown during it), ready_lines
              (what is shown after it) and following (how it follows the cluster until the end)
parser        the table of commands, and their parsers; its rows, with each command's options: serving, changing, looking; completion:
              of a shell's words; options, setting_options: those that several commands have; the flags that set settings
operate       scale, drain, role, pause, down; address: which cluster they mean;
              router_url: which router; running: the records of what serves here
foretelling   what a change of sizes is expected to bring, before scale and role
apply         gives a serving cluster another configuration
overview      `tandem status`, from the controller or from one router; node_table: the nodes, there and in top; deployments: all on a Ray cluster
logs          the log lines of all processes, in one order
top           the cluster as it changes, and its slowest requests
engines       what can compute models, and the check before another engine than ours is started
show_config   what `tandem config` prints
init          writes a commented tandem.yaml and a cluster's files
output        `-o json`; where a service's output and libraries' output go
"""
