"""A row becomes a document: token ids, and which of them are trained on.

In the order of the data:

formats.py         rows become documents, by the dataset's format; calls all the others
instructions.py    reads questions and answers that have columns of their own
pairs.py           reads rows with two answers to a prompt, or a judged one
scores/            rows for a head that scores: texts with a class or a score, and what pairs are for it
row_keys.py        keys that tell which rows are equal
conversation.py    reads a row's conversation, whatever names the file uses
numbers.py         reads the numbers of a row that a loss is told, and rows that are tokens already
own_code.py        code of the user's that a config names, found, and told apart by its source: functions that turn rows
                   into other rows, losses, networks
elsewhere.py       calls such a function in a process of its own, and lists the modules that it needs
templates.py       chat templates: which one applies, and the text it renders
sandbox.py         the process in which templates run, with limits, one for each process that reads rows
template_program.py  what runs there: Jinja's sandbox, with what transformers gives to templates
turns.py           which characters of that text are trained on, found by invisible marks around each message
marks.py           these marks
ends.py            the special tokens that end a turn
lost.py            what of a row is missing from its text
thoughts.py        empty thoughts that a template writes by itself
habits.py          what a template does around every turn, so that a conversation is not rendered for each
learn.py           learns that from conversations of our own
encoding.py        text becomes token ids, and characters that are trained on become tokens that are
"""
