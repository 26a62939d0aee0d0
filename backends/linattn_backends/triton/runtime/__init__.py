"""Launching, compiling ahead, devices, and the torch operator."""
