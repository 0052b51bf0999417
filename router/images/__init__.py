"""Images in a chat's messages: from a data URL to a file that is what it says, and to the placeholders that stand for it in the prompt.

files       data URLs, and whether a file is an image that may be read
reader      the images of one request, and their place in its prompt
"""
