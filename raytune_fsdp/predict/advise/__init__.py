"""What would be better.

advice.py        what may not be meant
changes.py       a config with a few fields changed; nearby.py: what one small change would do
alternatives.py  other ways to train the same
"""
