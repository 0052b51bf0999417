"""`tandem batch`: a file of requests answered. README.md says what it is.

commands  the row of the command
command   one run, from its flags to the written files
job       a job at a server: begun, followed, fetched
"""
