"""Nouns of dtorch: frozen, without I/O, importing nothing else of the package."""
