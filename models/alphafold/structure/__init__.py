"""Geometry of proteins: rigid frames, torsion angles, atoms, and the module that predicts them."""
