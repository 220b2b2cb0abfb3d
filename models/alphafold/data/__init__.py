"""Protein data for training: from structure files and alignments to the network's features.

The path of the data, one file each step: text (`text_source`), alignments (`a3m`, `stockholm`,
`hhr`), structures (`chains`), one coordinate system (`alignment`, `pairwise`, `templates`), ground
truth (`labels`), random choices (`msa_features`, `examples`), sets of proteins (`registry`,
`datasets`), loading in parallel (`loader`). Everything here is numpy; nothing needs JAX.
"""

from models.alphafold.data.alignment import Alignment
from models.alphafold.data.chains import Chain, read_chain, read_protein_file
from models.alphafold.data.errors import DataError, SkipCounter, SkippedDataWarning
from models.alphafold.data.examples import Protein, make_example, raw_features
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.registry import DEMO_PROTEINS, load_protein, load_proteins

__all__ = [
    "DEMO_PROTEINS",
    "Alignment",
    "Chain",
    "DataError",
    "FeatureConfig",
    "Protein",
    "SkipCounter",
    "SkippedDataWarning",
    "load_protein",
    "load_proteins",
    "make_example",
    "raw_features",
    "read_chain",
    "read_protein_file",
]
