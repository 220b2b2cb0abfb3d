"""A Tree-LSTM over syntax trees: does a function return a value?"""
