"""Rows -> tokens -> packed samples -> batches. Pure functions of (data, tokenizer, config, seed); knows nothing of Ray.

In the order of the data:

open.py            from a config to the windows to train on, and those to evaluate on
sources/           the rows of files, found by number
rows/              a row becomes a document: token ids, and which of them are trained on
unread.py          well-known columns that a format does not read
trial.py           functions of users are tried (does each give the same twice, and which modules does it need?), and
                   chat templates
duplicates.py      finds rows that become the same tokens, and leaves some of them out of the training
mixture.py         keyed permutations, and which row of which dataset comes at each place of an epoch
groups.py          the documents of one row that stay together, such as a pair; which other answer follows a judged one
packing.py         documents are packed into samples of one length
windows.py         a fixed group of rows, packed together: the unit of work and of caching
cache.py           built windows, as bytes on shared storage
identity.py        everything that decides the windows, and its fingerprint
census.py          every window built once and counted, before training; bad rows reported as training reaches them
stream.py          the endless sequence of packed samples, the same at every world size
targets.py         which of their tokens are predicted, document by document
batches.py         the samples of one rank, as tensors; to_device.py copies them before they are needed
shared_batches.py  micro-batches that several ranks share
reference.py       the log-probabilities that a reference gives to documents, kept beside the windows
teacher.py         what a teacher predicts in documents, kept for all that learn from it
questions.py       questions with known answers
"""
