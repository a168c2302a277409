"""What users hold: ``Tensor`` and everything that makes, moves and reads one."""
