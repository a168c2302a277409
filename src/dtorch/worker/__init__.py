"""Workers: look up, run, store. They know no sharding rules."""
