"""How plans and statistics are shown."""
