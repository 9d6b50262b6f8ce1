"""Peer copies: checkpoints in the memory of the nodes, from which a run goes on when ranks or a node are lost.

keeper.py   keeps files as bytes, on each node; knows nothing of what is in them
storage.py  a storage (checkpoint/storage.py) over the keepers of a run
clock.py    when a copy is due that takes two percent of the time at most

docs/design/peers.md gives the reasons. launch/ray/keepers.py runs the keepers, run/peers/ decides about copies.
"""
