"""What a session tells of itself: how its processes do, and what they log."""
