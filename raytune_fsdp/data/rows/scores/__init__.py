"""Rows for a head that scores (`model.head`): a document, a token of padding behind it, and a class or a score.

scoring.py    what of the head decides documents: its classes, and the token that texts are padded with
scored.py     reads such rows, and makes their documents
"""
