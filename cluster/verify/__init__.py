"""`tandem verify`: whether two servers give the same bits. README.md lists the files."""
