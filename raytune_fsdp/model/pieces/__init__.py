"""What a rank has of a tensor.

pieces.py      some of its rows, and some columns of a weight that is cut by columns
vocabulary.py  which tokens of the vocabulary a rank has
sums.py        sums over the ranks that compute a layer together
"""
