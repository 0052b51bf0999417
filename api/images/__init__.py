"""Images in a chat's messages: from a data URL to a checked file, and to the placeholders that stand for it
in the prompt.

files       data URLs, and the check that a file is an image that may be read
reader      the images of one request, and their places in its prompt
"""
