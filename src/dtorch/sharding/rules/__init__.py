"""Sharding rules, one file per operator family: functions above, the literal table last."""
