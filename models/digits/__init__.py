"""A residual network of data-dependent depth and width: which digit is it?"""
