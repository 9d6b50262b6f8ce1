"""A row becomes a document: token ids, and which of them are trained on.

In the order of the data:

formats       from rows to documents, by the dataset's format; calls all the others
chat          a row's conversation, whatever names the file uses
instruction   a question and its answer, in columns of their own
token_rows    rows that are already tokens
templates     chat templates: which one applies, and the text it renders
turns         which characters of that text are trained on
marks         invisible characters that show where the template put each message
lost_content  content of a row that the template left out
encoding      text becomes token ids; trained characters become trained tokens
"""
