"""What a person looks at: the data before a run, and what a run has left, read from its directory alone.

data.py      packed samples with the trained tokens marked; counts and lengths of documents
summary.py   the end of a run in a terminal: what it learned, where everything is, what to do next
curves.py    metrics.jsonl -> a picture
card.py      the model card of an export
"""
