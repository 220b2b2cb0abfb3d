"""The trainable part of the model, one network part a file, in the order of the paper."""
