"""What kernels of several cores share."""
