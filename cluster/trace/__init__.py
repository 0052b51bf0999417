"""`tandem trace`: where one request's time went. README.md lists the files."""
