"""Several router processes on one port, a wing of the router. README.md says what it is.

wing          this process among the others
sockets       questions to the others and reports to them, over Unix sockets
sent_reports  what each sends to nodes, told to the others
figures       the counters of all, added up
pages         the page's figures of all, added up
"""
