"""All sharding intelligence: specs in, plans out. Pure: no I/O and no tensor data."""
