"""Programs that show the library at work; run them from a checkout."""
