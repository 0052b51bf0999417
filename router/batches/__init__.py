"""OpenAI's files and batches, a wing of the router. README.md says what it is.

wing           the routes, each handler a function
answering      what the routes share; messages: Anthropic's message batches
uploads        a file's body, written while it arrives; form reads multipart/form-data
store          jobs and their lines in a folder, stored_files: files; database: their tables, store_thread: the thread that uses them
runner         lines claimed and answered with what is idle
estimate       when a job will be done
line_exchange  one line as a request of this router
job_files      a job's input read and checked, its output and error files written
"""
