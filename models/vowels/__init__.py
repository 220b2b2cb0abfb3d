"""A recurrent network over series of different lengths: who speaks the vowel?"""
