"""Programs written with dtorch: run each as ``python -m examples.NAME``."""
