"""Advice: what would be better.

advice.py        what may not be meant
changes.py       a config with a few fields changed
alternatives.py  other ways to train the same, and what one small change would do
"""
