"""`tandem doctor`: what this machine offers, what is wrong with it, and what to do about it. README.md lists the
files."""
