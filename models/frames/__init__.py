"""A network that looks at noisy pictures of digits until what it sees has settled."""
