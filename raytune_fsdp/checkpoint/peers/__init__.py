"""Peer copies: checkpoints in the memory of the nodes, from which a run goes on when ranks or a node are lost.

keeper.py   keeps files as bytes, on each node; knows nothing of what is in them
storage.py  a storage (checkpoint/storage.py) over the keepers of a run
"""
