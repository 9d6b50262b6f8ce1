"""A row becomes a document: token ids, and which of them are trained on.

In the order of the data:

formats       from rows to documents, by the dataset's format; calls all the others
chat          a row's conversation, whatever names the file uses
instruction   a question and its answer, in columns of their own
functions     rows that a function of the user's turns into other rows
elsewhere     that function in a process of its own, and the modules that it needs
token_rows    rows that are already tokens
templates     chat templates: which one applies, and the text it renders
sandbox       where they run, compiled once; compiler, filters: what Jinja makes of them, charging for their work
work          how much work one may do for a row
turns         which characters of that text are trained on
marks         invisible characters that show where the template put each message
lost_content  content of a row that the template left out
special_tokens  the text of special tokens in contents
encoding      text becomes token ids; trained characters become trained tokens
"""
