"""The nodes of a cluster: what they have, and what they say.

sizes.py       how many ranks the next attempt has, and what a run would like to have
growth.py      when an attempt makes way for a larger one
node_watch.py  a small actor on every node of a run; process_ends.py: which of its ranks have ended; spot.py: what a
               cloud says of a machine
checked.py     questions to the nodes
hub_reach.py   whether a node can have the weights of a hub model
"""
