"""Models from the papers, small enough to read, on linattn's public API. ``PYTHONPATH=examples`` makes them importable."""
