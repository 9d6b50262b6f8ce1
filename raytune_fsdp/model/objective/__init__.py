"""What a step minimises, from hidden states to a sum.

objective.py        the cross-entropy of the targets, what a run adds to it, and the gradient of both
loss.py             the loss of a micro-batch, summed over its targets
losses.py           the results of a forward pass for its targets
own_loss.py         values of the user's own in the place of cross-entropies
judged.py           what the loss of a group is computed from
preference.py       losses of pairs
kto.py              the loss of answers that are desirable or not
told.py             what the host knows of a micro-batch's documents
groups.py           losses of groups of documents in the place of cross-entropies
score_head.py       the scores of documents, and their losses
scores.py           what these losses are
distillation.py     divergences from a teacher's predictions, in the place of cross-entropies; what a network predicts
figures.py          what is recorded of groups, and of what is learned from a teacher
chunked_head.py     losses without the logits of a whole micro-batch
documents.py        the losses of single documents
routers.py          the losses that keep experts balanced
embedding_noise.py  NEFTune
"""
