"""How instructions reach a worker: in this thread, in another thread, or as frames of bytes."""
