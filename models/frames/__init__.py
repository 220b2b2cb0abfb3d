"""A network that looks at noisy pictures of digits until it is sure of them."""
