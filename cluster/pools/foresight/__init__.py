"""What changes of sizes were expected to bring, graded by what came. README.md lists the files."""
