"""Small changes of the product's code, each of which a test should notice. `python -m tests.mutation --help`"""
