"""The controller: device map, routing and counters. It never touches tensor data."""
