"""A checkpoint of weights in, a sharded module out, a checkpoint of weights out."""
