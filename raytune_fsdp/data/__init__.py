"""Rows -> tokens -> packed samples -> batches. Pure functions of (data, tokenizer, config, seed); knows nothing of Ray.

In the order of the data:

open_data      from a config to the windows to train on, and those to evaluate on
duplicates     rows that become the same tokens, found before any is tokenized
left_out       which of them are not trained on
sources/       the rows of files, found by number
mixture        which row of which dataset comes at each place of an epoch
order          the keyed permutations behind that order
rows/          a row becomes a document: token ids, and which of them are trained on
trial          functions of users are tried: the same twice, and which modules they need
packing        documents become packed samples of one length
unread         well-known columns that a format does not read
windows        a fixed group of rows, packed together: the unit of work and of caching
packed_window  one built window: its samples, its counts, its bytes on storage
cache          built windows on shared storage
identity       everything that decides the windows, and its fingerprint
census         every window built once and counted, before training
stream         the endless sequence of packed samples, the same at every world size (division.py cuts it into steps)
batches        the blocks of one rank, as tensors
parts          blocks that several ranks share
skipped        the rows left out because of `data.bad_rows=skip`, reported as training reaches them
"""
