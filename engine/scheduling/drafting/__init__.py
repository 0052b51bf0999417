"""How long drafts may be, at the scheduler.

judge  how many draft tokens each request may get, so that drafts pay
"""
