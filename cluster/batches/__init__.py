"""`tandem batch`: a file of requests answered. README.md lists the files."""
