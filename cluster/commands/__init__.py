"""What an operator types, and what is shown.

serve         preflight, progress, following, ready_lines: checked, shown while it starts, and followed to its end
operate       scale, drain, role, pause, down; operate_options: their arguments; address: which cluster;
              http_control: through a router
apply         another configuration for a cluster that serves
overview, status     `tandem status`, from the controller and from one router; deployments: all on a Ray cluster
logs          lines of every process's log, in one order
top           the cluster as it changes, and its slowest requests
doctor, machine_checks   what this machine offers; one check for each subject; link_checks: between
              machines and between GPUs; numa_check: which memory is near
bench         one run of the load generator (loadgen/), from its flags to its table
chat, show_config
parser, setting_options      a subcommand's arguments; the flags that set settings
init          a commented tandem.yaml and a cluster's files
output        `-o json`; what a service prints, and what libraries print
"""
