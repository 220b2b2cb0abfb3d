"""An AlphaFold-2-style model in Haiku, written from the paper, with its training pipeline.

    config.py     configurations (ml_collections), sizes and loss weights
    data/         from structures and alignments to features
    network/      the trainable network, in the order of the paper
    structure/    frames, torsions, atoms, structure module
    losses/       one loss a file
    trunk.py      a train step for the Evoformer alone
    reference.py  checks every part against stored numbers

"Algorithm" and "section" numbers are those of the supplement.

References:
    J. Jumper et al., Highly accurate protein structure prediction with AlphaFold,
    Nature 596 (2021).
"""
