"""A row becomes a document: token ids, and which of them are trained on.

In the order of the data:

formats.py         from rows to documents, by the dataset's format; calls all the others. Instructions and tokens, too
row_keys.py        keys that tell which rows are equal
conversation.py    a row's conversation, whatever names the file uses
user_functions.py  rows that a function of the user's turns into other rows
elsewhere.py       that function in a process of its own, and the modules that it needs
templates.py       chat templates: which one applies, and the text it renders
sandbox.py         where they run; compiler.py, filters.py: what Jinja makes of them, charging for their work
work.py            how much work one may do for a row
turns.py           which characters of that text are trained on, by invisible marks around each message
encoding.py        text becomes token ids, and trained characters trained tokens
"""
