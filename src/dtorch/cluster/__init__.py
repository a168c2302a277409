"""Processes of a session: starting and ending them, on one machine or many."""
