"""A row becomes a document: token ids, and which of them are trained on.

formats      from a row to a document, by the dataset's format
chat         a row's conversation, whatever the file calls its parts
instruction  a question and its answer in columns of their own
token_rows   rows that are tokens already
templates    chat templates: which one is used, and the text it makes of a conversation
turns        which characters of that text the assistant wrote
marks        how a message is found in its text
lost_content what a row says and its text does not
encoding     characters become tokens
"""
