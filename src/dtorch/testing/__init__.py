"""The public test kit: what shows that dtorch gives what plain PyTorch gives."""
