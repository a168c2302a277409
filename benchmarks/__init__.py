"""What dtorch costs, beside plain PyTorch in the same run: ``python -m benchmarks``."""
