"""`tandem chat`: `commands` has its row, `command` the conversation."""
